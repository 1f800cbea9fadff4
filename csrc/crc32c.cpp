// CRC-32C (Castagnoli, RFC 3720): eight tables, or the SSE4.2 instruction on three
// interleaved lanes (it takes three cycles and starts every cycle). Equal results.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <memory>
#include <new>

#include "parallel.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;

struct Tables {
  uint32_t at[8][256] = {};
  constexpr Tables() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ kPolynomial : crc >> 1;
      at[0][byte] = crc;
    }
    for (int k = 1; k < 8; ++k)
      for (int byte = 0; byte < 256; ++byte) {
        const uint32_t before = at[k - 1][byte];
        at[k][byte] = before >> 8 ^ at[0][before & 0xff];
      }
  }
};
constexpr Tables kTables;

inline uint32_t step(uint32_t crc, uint8_t byte) { return crc >> 8 ^ kTables.at[0][(crc ^ byte) & 0xff]; }

uint32_t with_tables(uint32_t crc, const uint8_t* p, size_t n) {
  for (; n >= 8; n -= 8, p += 8) {
    uint32_t out = 0;
    for (int k = 0; k < 4; ++k)
      out ^= kTables.at[7 - k][(p[k] ^ crc >> 8 * k) & 0xff] ^ kTables.at[3 - k][p[4 + k]];
    crc = out;
  }
  for (; n; --n) crc = step(crc, *p++);
  return crc;
}

// A register moved past a fixed number of zero bytes, a table lookup per byte of it.
struct Shift {
  uint32_t at[4][256] = {};
  constexpr explicit Shift(size_t zeros) {
    uint32_t columns[32] = {};  // where each bit ends up
    for (int bit = 0; bit < 32; ++bit) columns[bit] = 1u << bit;
    uint32_t power[32] = {};  // one byte of zeros, then squared for each binary digit
    for (int bit = 0; bit < 32; ++bit) {
      const uint32_t crc = 1u << bit;
      power[bit] = crc >> 8 ^ kTables.at[0][crc & 0xff];
    }
    for (size_t left = zeros; left; left >>= 1) {
      if (left & 1)
        for (int bit = 0; bit < 32; ++bit) columns[bit] = apply(power, columns[bit]);
      uint32_t squared[32] = {};
      for (int bit = 0; bit < 32; ++bit) squared[bit] = apply(power, power[bit]);
      for (int bit = 0; bit < 32; ++bit) power[bit] = squared[bit];
    }
    for (int k = 0; k < 4; ++k)
      for (uint32_t byte = 0; byte < 256; ++byte) at[k][byte] = apply(columns, byte << 8 * k);
  }
  static constexpr uint32_t apply(const uint32_t (&matrix)[32], uint32_t vector) {
    uint32_t out = 0;
    for (int bit = 0; vector; vector >>= 1, ++bit)
      if (vector & 1) out ^= matrix[bit];
    return out;
  }
  uint32_t operator()(uint64_t crc) const {
    return at[0][crc & 0xff] ^ at[1][crc >> 8 & 0xff] ^ at[2][crc >> 16 & 0xff] ^ at[3][crc >> 24 & 0xff];
  }
};

// What one thread sums at a time of a large buffer: a multiple of the alignment that keeps it in its cache.
constexpr size_t kPiece = 128 << 10;
constexpr Shift kShiftPiece{kPiece};

#if defined(__x86_64__)

constexpr size_t kLong = 8192, kShort = 256;
constexpr Shift kShiftLong{kLong};
constexpr Shift kShiftShort{kShort};

inline uint64_t word(const uint8_t* p) {
  uint64_t out;
  memcpy(&out, p, 8);
  return out;
}

__attribute__((target("sse4.2"))) uint64_t lanes(uint64_t crc, const uint8_t*& p, size_t& n, size_t span,
                                                 const Shift& shift) {
  for (; n >= 3 * span; n -= 3 * span, p += 3 * span) {
    uint64_t b = 0, c = 0;
    for (size_t i = 0; i < span; i += 8) {
      crc = _mm_crc32_u64(crc, word(p + i));
      b = _mm_crc32_u64(b, word(p + span + i));
      c = _mm_crc32_u64(c, word(p + 2 * span + i));
    }
    crc = shift(shift(crc) ^ b) ^ c;
  }
  return crc;
}

__attribute__((target("sse4.2"))) uint32_t with_instruction(uint32_t from, const uint8_t* p, size_t n) {
  uint64_t crc = lanes(from, p, n, kLong, kShiftLong);
  crc = lanes(crc, p, n, kShort, kShiftShort);
  for (; n >= 8; n -= 8, p += 8) crc = _mm_crc32_u64(crc, word(p));
  uint32_t out = static_cast<uint32_t>(crc);
  for (; n; --n) out = _mm_crc32_u8(out, *p++);
  return out;
}

#endif

}  // namespace

// Goes on from `value`; `tables` asks for the portable way.
extern "C" __attribute__((visibility("default"))) uint32_t pm_crc32c(const void* data, size_t nbytes,
                                                                     uint32_t value,
                                                                     [[maybe_unused]] int tables) {
  const auto* p = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  if (!tables && __builtin_cpu_supports("sse4.2")) return ~with_instruction(~value, p, nbytes);
#endif
  return ~with_tables(~value, p, nbytes);
}

// The same by all threads of a pool: pieces are summed apart and joined in order; the first is the odd one.
// Returns 0, or 2 where there is no memory for the sums.
extern "C" __attribute__((visibility("default"))) int pm_crc32c_wide(packmule::Pool* pool, const void* data,
                                                                    size_t nbytes, int tables, uint32_t* out) {
  const auto* p = static_cast<const uint8_t*>(data);
  const auto pieces = static_cast<int64_t>((nbytes + kPiece - 1) / kPiece);
  const size_t first = nbytes - (pieces > 0 ? static_cast<size_t>(pieces - 1) * kPiece : 0);
  const std::unique_ptr<uint32_t[]> sums(new (std::nothrow) uint32_t[static_cast<size_t>(pieces) + 1]);
  if (!sums) return 2;
  uint32_t* found = sums.get();
  parallel(pool, pieces, kPiece, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const size_t at = i ? first + static_cast<size_t>(i - 1) * kPiece : 0;
      found[i] = pm_crc32c(p + at, i ? kPiece : first, 0, tables);
    }
  });
  uint32_t crc = 0;
  for (int64_t i = 0; i < pieces; ++i) crc = (i ? kShiftPiece(crc) : 0) ^ found[i];
  *out = crc;
  return 0;
}

#!/bin/bash
# Builds the kernels for aarch64 and for this machine, runs digest.cpp on both (the first under
# qemu-user) and compares: same source, same bits. Needs g++-aarch64-linux-gnu and qemu-user.
set -eu
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake -S . -B "$work/here" -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$work/here" -j2 >/dev/null
cmake -S . -B "$work/arm" -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux \
    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CXX_FLAGS=-Werror >/dev/null
cmake --build "$work/arm" -j2 >/dev/null
g++ -std=c++17 -O1 tests/native/digest.cpp -o "$work/digest" -ldl
aarch64-linux-gnu-g++ -std=c++17 -O1 tests/native/digest.cpp -o "$work/digest.arm" -ldl
"$work/digest" "$work/here/_packmule_kernels.so" >"$work/here.txt"
qemu-aarch64 -L /usr/aarch64-linux-gnu "$work/digest.arm" "$work/arm/_packmule_kernels.so" >"$work/arm.txt"
diff "$work/here.txt" "$work/arm.txt"
echo "$(wc -l <"$work/here.txt") results of the scalar kernels agree to the bit on $(uname -m) and aarch64"

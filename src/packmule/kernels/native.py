"""The native family: csrc through ctypes, which releases the GIL. Imports no torch.

The library is one file beside this module. It holds the same kernels once per instruction
set, and picks none: the symbols' names end in the build's.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from packmule.kernels import checks
from packmule.kernels.contract import Family

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Buffer

ISAS = ("avx512", "avx2", "scalar")
"""Widest first."""

ABI = 8
CODES = {"float32": 0, "bfloat16": 1, "float64": 2}

_P, _I, _L, _D = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
# Arguments after the pool, as csrc/kernels.cpp declares them.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "rmsnorm": (_I, _L, _L, _P, _P, _D, _D, _P, _P),
    "rmsnorm_backward": (_I, _L, _L, _P, _P, _P, _D, _P, _P, _P, _P, _I),
    "layernorm": (_I, _L, _L, _P, _P, _P, _D, _P, _P, _P),
    "layernorm_backward": (_I, _L, _L, _P, _P, _P, _P, _P, _P, _P, _P, _I),
    "column_sums": (_I, _L, _L, _P, _P, _I),
    "rope": (_I, _L, _L, _L, _L, _L, _P, _P, _P, _P, _I),
    "activate": (_I, _I, _L, _P, _P, _P),
    "activate_backward": (_I, _I, _L, _P, _P, _P, _P, _P),
    "softcap": (_I, _L, _P, _D, _D),
    "softcap_backward": (_I, _L, _P, _P, _D, _D),
    "cross_entropy": (_I, _L, _L, _P, _P, _D, _P, _I),
    "embedding": (_I, _L, _L, _L, _P, _P, _P, _D, _I),
    "embedding_backward": (_I, _L, _L, _L, _P, _P, _P, _I, _D),
    "accumulate": (_I, _L, _P, _P, _I),
    "cast": (_I, _I, _L, _P, _P),
    "sum_squares": (_I, _L, _P, _P),
    "adamw": (_I, _I, _L, _P, _P, _P, _P, _P, _P),
    "adalomo": (_I, _I, _L, _L, _P, _P, _P, _P, _P, _P),
    "sgd": (_I, _I, _L, _P, _P, _P, _D, _D),
    "causal_softmax": (_I, _L, _L, _L, _P, _L, _L, _D, _P),
    "causal_softmax_backward": (_I, _L, _L, _P, _P, _P, _D),
    "route": (_I, _L, _L, _L, _P, _I, _P, _P, _P),
    "route_backward": (_I, _L, _L, _L, _P, _P, _P, _P, _I, _P),
    "dispatch": (_L, _L, _L, _P, _P, _P, _P),
    "weigh": (_I, _L, _L, _L, _P, _P, _P),
    "weigh_backward": (_I, _L, _L, _L, _P, _P, _P, _P, _P),
}


def library_path() -> Path | None:
    """Where the built library is, or None. An editable install may keep it in a second folder."""
    import packmule.kernels

    paths = (Path(folder) / "_packmule_kernels.so" for folder in packmule.kernels.__path__)
    return next((path for path in paths if path.is_file()), None)


def open_library() -> ctypes.CDLL:
    """The library, its functions declared.

    Raises:
        ValueError: it is not built, or was built from other sources.
    """
    path = library_path()
    if path is None:
        raise ValueError("the native kernels are not built; see CMakeLists.txt, or ask for isa='torch'")
    library = ctypes.CDLL(str(path))
    if library.pm_abi() != ABI:
        raise ValueError(f"{path} was built from other sources; build it again")
    library.pm_create.argtypes, library.pm_create.restype = [_I, _P], _P
    library.pm_destroy.argtypes, library.pm_destroy.restype = [_P], None
    library.pm_runs.argtypes = [ctypes.c_char_p]
    library.pm_crc32c.argtypes = [_P, ctypes.c_size_t, ctypes.c_uint32, _I]
    library.pm_crc32c.restype = ctypes.c_uint32
    library.pm_crc32c_wide.argtypes = [_P, _P, ctypes.c_size_t, _I, _P]
    library.pm_transfers_create.argtypes, library.pm_transfers_create.restype = [_I], _P
    library.pm_transfers_destroy.argtypes, library.pm_transfers_destroy.restype = [_P], None
    library.pm_transfers_ring.argtypes = [_P]
    library.pm_transfer.argtypes = [_P, _I, _I, _I, _I, _P, _P, _P, _P, _P, _P]
    return library


def available() -> tuple[str, ...]:
    """The builds this CPU runs, widest first; empty where the library is not built."""
    if library_path() is None:
        return ()
    library = open_library()
    return tuple(isa for isa in ISAS if library.pm_runs(isa.encode()))


def openmp_team(maps: Path = Path("/proc/self/maps")) -> int | None:
    """The address of GOMP_parallel in the GNU OpenMP run time that this process has loaded (torch's),
    or None. Matrix products leave its workers spinning for a while; kernels that run on the same
    workers need not fight them for the cores."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}
    if len(paths) != 1:
        return None
    return ctypes.cast(ctypes.CDLL(paths.pop()).GOMP_parallel, _P).value


class NativeKernels:
    """`packmule.kernels.contract.Kernels` in csrc.

    Calls from several threads at once are safe; one of them gets the workers.

    Args:
        threads: of the pool, the calling thread included.
        isa: one of ISAS, or None for the widest this CPU runs.
        team: address of the GOMP_parallel whose threads the creating thread shares (see
            `openmp_team`), or None for threads of its own.

    Raises:
        ValueError: the library is not built, or lacks the isa, or the CPU does.
    """

    family: Family = "native"

    def __init__(self, threads: int, isa: str | None = None, team: int | None = None) -> None:
        library = open_library()
        runs = [name for name in ISAS if library.pm_runs(name.encode())]
        if isa is not None and isa not in runs:
            raise ValueError(f"isa is {isa!r}; this machine runs {', '.join((*runs, 'torch'))}")
        self.threads = threads
        self.isa = isa or runs[0]
        self._functions = {}
        for name, arguments in SIGNATURES.items():
            function = getattr(library, f"pm_{name}_{self.isa}")
            function.argtypes = [_P, *arguments]
            self._functions[name] = function
        self._crc = library.pm_crc32c
        self._functions["crc32c_wide"] = library.pm_crc32c_wide
        self._pool = library.pm_create(threads, team)
        if not self._pool:
            raise ValueError(f"cannot start {threads} threads")
        self._finalizer = weakref.finalize(self, library.pm_destroy, self._pool)

    def close(self) -> None:
        """End the worker threads."""
        self._pool = None
        self._finalizer()

    def _call(self, name: str, *arguments: Any, index: str = "") -> None:
        if self._pool is None:
            raise ValueError("these kernels are closed")
        code = self._functions[name](self._pool, *arguments)
        if code == 1:
            raise ValueError(checks.OUT_OF_RANGE[index])
        if code == 2:
            raise MemoryError(f"no memory for the partial sums of {name}")
        if code:
            raise ValueError(f"{name} does not offer these dtypes")

    def rmsnorm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor, rstd: Tensor, offset: float = 0.0
    ) -> None:
        sizes = checks.rmsnorm(x, weight, out, rstd)
        inputs = (_pointer(x), _pointer(weight), offset, eps)
        self._call("rmsnorm", _code(x), *sizes, *inputs, _pointer(out), _pointer(rstd))

    def rmsnorm_backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        rstd: Tensor,
        dx: Tensor,
        dweight: Tensor,
        residual: Tensor | None,
        first: bool,
        offset: float = 0.0,
    ) -> None:
        sizes = checks.rmsnorm_backward(dy, x, weight, rstd, dx, dweight, residual)
        inputs = (_pointer(dy), _pointer(x), _pointer(weight), offset, _pointer(rstd))
        outputs = (_pointer(dx), _pointer(dweight))
        self._call("rmsnorm_backward", _code(x), *sizes, *inputs, *outputs, _pointer(residual), first)

    def layernorm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor, mean: Tensor, rstd: Tensor
    ) -> None:
        sizes = checks.layernorm(x, weight, bias, out, mean, rstd)
        inputs = (_pointer(x), _pointer(weight), _pointer(bias), eps)
        self._call("layernorm", _code(x), *sizes, *inputs, _pointer(out), _pointer(mean), _pointer(rstd))

    def layernorm_backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        mean: Tensor,
        rstd: Tensor,
        dx: Tensor,
        dweight: Tensor,
        residual: Tensor | None,
        first: bool,
    ) -> None:
        sizes = checks.layernorm_backward(dy, x, weight, mean, rstd, dx, dweight, residual)
        inputs = (_pointer(dy), _pointer(x), _pointer(weight), _pointer(mean), _pointer(rstd))
        outputs = (_pointer(dx), _pointer(dweight))
        self._call("layernorm_backward", _code(x), *sizes, *inputs, *outputs, _pointer(residual), first)

    def column_sums(self, x: Tensor, out: Tensor, first: bool) -> None:
        sizes = checks.column_sums(x, out)
        self._call("column_sums", _code(x), *sizes, _pointer(x), _pointer(out), first)

    def rope(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, head_dim: int, inverse: bool
    ) -> None:
        sizes = checks.rope(x, cos, sin, positions, head_dim)
        inputs = (_pointer(x), _pointer(cos), _pointer(sin), _pointer(positions))
        self._call("rope", _code(x), *sizes, *inputs, inverse, index="positions")

    def activate(self, gate: Tensor, up: Tensor | None, out: Tensor, kind: str) -> None:
        sizes = checks.activation(kind, gate, up, out=out)
        self._call("activate", _code(gate), *sizes, _pointer(gate), _pointer(up), _pointer(out))

    def activate_backward(
        self,
        da: Tensor,
        gate: Tensor,
        up: Tensor | None,
        dgate: Tensor,
        dup: Tensor | None,
        kind: str,
    ) -> None:
        sizes = checks.activation(kind, gate, up, da=da, dgate=dgate, dup=dup)
        inputs = (_pointer(da), _pointer(gate), _pointer(up))
        self._call("activate_backward", _code(gate), *sizes, *inputs, _pointer(dgate), _pointer(dup))

    def softcap(self, x: Tensor, scale: float, cap: float) -> None:
        count = checks.softcap(x, scale, cap)
        self._call("softcap", _code(x), count, _pointer(x), scale, cap)

    def softcap_backward(self, dy: Tensor, y: Tensor, scale: float, cap: float) -> None:
        count = checks.softcap(dy, scale, cap, y)
        self._call("softcap_backward", _code(dy), count, _pointer(dy), _pointer(y), scale, cap)

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, scale: float, loss: Tensor, gradient: bool
    ) -> None:
        chunk, vocab = checks.cross_entropy(logits, targets, loss)
        inputs = (_pointer(logits), _pointer(targets), scale, _pointer(loss))
        self._call("cross_entropy", _code(logits), chunk, vocab, *inputs, gradient, index="targets")

    def embedding(
        self, table: Tensor, ids: Tensor, out: Tensor, scale: float = 1.0, add: bool = False
    ) -> None:
        sizes = checks.embedding(table, ids, out)
        pointers = (_pointer(table), _pointer(ids), _pointer(out))
        self._call("embedding", _code(table), *sizes, *pointers, scale, add, index="ids")

    def embedding_backward(
        self, dy: Tensor, ids: Tensor, grad: Tensor, first: bool, scale: float = 1.0
    ) -> None:
        sizes = checks.embedding_backward(dy, ids, grad)
        pointers = (_pointer(dy), _pointer(ids), _pointer(grad))
        self._call("embedding_backward", _code(dy), *sizes, *pointers, first, scale, index="ids")

    def accumulate(self, dst: Tensor, src: Tensor, first: bool) -> None:
        count = checks.accumulate(dst, src)
        self._call("accumulate", _code(src), count, _pointer(dst), _pointer(src), first)

    def cast(self, dst: Tensor, src: Tensor) -> None:
        count = checks.cast(dst, src)
        self._call("cast", _code(dst), _code(src), count, _pointer(dst), _pointer(src))

    def sum_squares(self, x: Tensor) -> float:
        count = checks.same(x=x)
        total = ctypes.c_double()
        self._call("sum_squares", _code(x), count, _pointer(x), ctypes.addressof(total))
        return total.value

    def adamw(
        self,
        master: Tensor,
        m: Tensor,
        v: Tensor,
        grad: Tensor,
        weight: Tensor | None,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float,
    ) -> None:
        count = checks.adamw(master, m, v, grad, weight, step)
        scalars = (_D * 9)(
            1 - lr * weight_decay,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            lr / (1 - beta1**step),
            1 / math.sqrt(1 - beta2**step),
            eps,
            grad_scale,
        )
        state = (_pointer(master), _pointer(m), _pointer(v), _pointer(grad))
        types = (_code(grad), _code(grad if weight is None else weight))
        self._call("adamw", *types, count, *state, _pointer(weight), ctypes.addressof(scalars))

    def adalomo(
        self,
        master: Tensor,
        rows: Tensor,
        columns: Tensor | None,
        grad: Tensor,
        weight: Tensor | None,
        lr: float,
        decay: float,
        eps: float,
        least: float,
        most: float,
        weight_decay: float,
        grad_scale: float,
    ) -> None:
        sizes = checks.adalomo(master, rows, columns, grad, weight)
        scalars = (_D * 7)(lr, decay, eps, least, most, weight_decay, grad_scale)
        types = (_code(grad), _code(grad if weight is None else weight))
        state = (_pointer(master), _pointer(rows), _pointer(columns), _pointer(grad))
        self._call("adalomo", *types, *sizes, *state, _pointer(weight), ctypes.addressof(scalars))

    def sgd(
        self,
        master: Tensor,
        grad: Tensor,
        weight: Tensor | None,
        lr: float,
        weight_decay: float,
        grad_scale: float,
    ) -> None:
        count = checks.sgd(master, grad, weight)
        types = (_code(grad), _code(grad if weight is None else weight))
        pointers = (_pointer(master), _pointer(grad), _pointer(weight))
        self._call("sgd", *types, count, *pointers, 1 - lr * weight_decay, lr * grad_scale)

    def crc32c(self, buffer: Buffer, value: int = 0) -> int:
        data = np.frombuffer(memoryview(buffer).cast("B"), dtype=np.uint8)
        return self.crc32c_address(data.ctypes.data, data.size, value)

    def crc32c_address(self, address: int, nbytes: int, value: int = 0) -> int:
        return int(self._crc(address, nbytes, value, self.isa == "scalar"))

    def crc32c_wide(self, buffer: Buffer) -> int:
        data, found = np.frombuffer(memoryview(buffer).cast("B"), dtype=np.uint8), ctypes.c_uint32()
        place = (data.ctypes.data, data.size, self.isa == "scalar", ctypes.byref(found))
        self._call("crc32c_wide", *place)
        return found.value

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        ctypes.memset(address, checks.byte(byte), nbytes)

    def causal_softmax(
        self, scores: Tensor, offset: int, scale: float, lse: Tensor, window: int | None = None
    ) -> None:
        sizes = checks.causal_softmax(scores, offset, lse, window)
        seen = (offset, sizes[1] + offset if window is None else window)
        self._call("causal_softmax", _code(scores), *sizes, _pointer(scores), *seen, scale, _pointer(lse))

    def causal_softmax_backward(self, p: Tensor, dp: Tensor, delta: Tensor, scale: float) -> None:
        batch, n, m = checks.causal_softmax_backward(p, dp, delta)
        pointers = (_pointer(p), _pointer(dp), _pointer(delta))
        self._call("causal_softmax_backward", _code(p), batch * n, m, *pointers, scale)

    def route(self, logits: Tensor, renormalize: bool, chosen: Tensor, share: Tensor, mass: Tensor) -> None:
        sizes = checks.route(logits, chosen, share, mass)
        outputs = (_pointer(chosen), _pointer(share), _pointer(mass))
        self._call("route", _code(logits), *sizes, _pointer(logits), renormalize, *outputs)

    def route_backward(
        self,
        logits: Tensor,
        chosen: Tensor,
        dshare: Tensor,
        balance: Tensor,
        renormalize: bool,
        dlogits: Tensor,
    ) -> None:
        sizes = checks.route_backward(logits, chosen, dshare, balance, dlogits)
        inputs = (_pointer(logits), _pointer(chosen), _pointer(dshare), _pointer(balance), renormalize)
        self._call("route_backward", _code(logits), *sizes, *inputs, _pointer(dlogits), index="chosen")

    def dispatch(self, chosen: Tensor, pairs: Tensor, tokens: Tensor, offsets: Tensor) -> None:
        sizes = checks.dispatch(chosen, pairs, tokens, offsets)
        outputs = (_pointer(pairs), _pointer(tokens), _pointer(offsets))
        self._call("dispatch", *sizes, _pointer(chosen), *outputs, index="chosen")

    def weigh(self, x: Tensor, share: Tensor, pairs: Tensor) -> None:
        sizes = checks.weigh(x, share, pairs)
        pointers = (_pointer(x), _pointer(share), _pointer(pairs))
        self._call("weigh", _code(x), *sizes, *pointers, index="pairs")

    def weigh_backward(self, dy: Tensor, x: Tensor, share: Tensor, pairs: Tensor, dshare: Tensor) -> None:
        sizes = checks.weigh_backward(dy, x, share, pairs, dshare)
        pointers = (_pointer(dy), _pointer(x), _pointer(share), _pointer(pairs), _pointer(dshare))
        self._call("weigh_backward", _code(x), *sizes, *pointers, index="pairs")


def _pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor lies; kernels follow it without asking."""
    if tensor is None:
        return None
    if not tensor.is_cpu:
        raise ValueError(f"a tensor is on {tensor.device}, expected all on the CPU")
    return tensor.data_ptr()


def _code(tensor: Tensor) -> int:
    return CODES[checks.dtype_name(tensor)]

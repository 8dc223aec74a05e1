"""Instructions of a thread of the ragged kernel, inside `plgpu.inline_mgpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.mosaic_sm80.emitter import WARPGROUP, Emitter

# The layout of an array with one value a thread.
THREADS = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)


class ThreadEmitter(Emitter):
    """Loads, stores and values of one thread. Offsets are constants of an instruction."""

    def ptx(self, code: str, *args: Any, results: int = 1, reads: bool = False) -> Any:
        """Return the words that `code` computes; one that `reads` memory stays in its place."""
        return self._utils.inline_ptx(
            code,
            *args,
            result_types=[self._i32] * results if results > 1 else self._i32,
            has_side_effects=reads,
        )

    def effect(self, code: str, *args: Any) -> None:
        """Run `code` for its effects."""
        self._utils.inline_ptx(code, *args, has_side_effects=True)

    def run_if(self, condition: Any, body: Callable[[], None]) -> None:
        """Run `body` in threads where the condition holds."""
        with self._ir.InsertionPoint(self._scf.IfOp(condition).then_block):
            body()
            self._scf.yield_([])

    def place_in_accumulator(self) -> tuple[Any, Any]:
        """Return the thread's first row and first column in an array with the layout `WGMMA`."""
        lane, warp = self.rem(self.thread(), 32), self.div(self.thread(), 32)
        row = self.add(self.mul(warp, 16), self.div(lane, 4))
        return row, self.mul(self.rem(lane, 4), 2)

    def words(self, x: Any) -> Any:
        """Return the pairs of 16-bit elements of an array in `WGMMA`, `[rows / 64, K / 8, 2]`.

        The last axis are the thread's rows `r` and `r + 8`.
        """
        words = [self._utils.bitcast(pair, self._i32) for pair in x.registers.flat]
        return np.array(words, dtype=object).reshape(x.shape[0] // 64, x.shape[1] // 8, 2)

    def row_words(self, x: Any) -> list[Any]:
        """Return the f32 of an array with one value a row, of rows `r` and `r + 8` of every 64."""
        return [self._utils.bitcast(value, self._i32) for value in x.registers.flat]

    def load_word(self, address: Any, *, offset: int = 0) -> Any:
        """Return 32 bits of shared memory."""
        return self.ptx(f"ld.shared.b32 $0, [$1+{offset}];", address, reads=True)

    def load_chunk(self, address: Any, *, offset: int = 0) -> list[Any]:
        """Return the four words of 16 bytes of shared memory."""
        code = f"ld.shared.v4.b32 {{$0,$1,$2,$3}}, [$4+{offset}];"
        return list(self.ptx(code, address, results=4, reads=True))

    def store_word(self, address: Any, word: Any, *, offset: int = 0) -> None:
        """Store 32 bits to shared memory."""
        self.effect(f"st.shared.b32 [$0+{offset}], $1;", address, word)

    def store_chunk(self, address: Any, words: list[Any], *, offset: int = 0) -> None:
        """Store 16 bytes to shared memory."""
        self.effect(f"st.shared.v4.b32 [$0+{offset}], {{$1,$2,$3,$4}};", address, *words)

    def copy_chunk(self, to: Any, source: Any, index: Any, unit: int, *, offset: int) -> None:
        """Start the copy of 16 bytes that are `index * unit` bytes after `source`."""
        self.effect(
            f"{{ .reg .b64 a; mad.wide.u32 a, $2, {unit}, $1;"
            f" cp.async.cg.shared.global [$0+{offset}], [a], 16; }}",
            to,
            source,
            index,
        )

    def load_device_word(self, address: Any) -> Any:
        """Return 32 bits of device memory."""
        return self.ptx("ld.global.b32 $0, [$1];", address, reads=True)

    def store_device_chunk(self, address: Any, words: list[Any]) -> None:
        """Store 16 bytes to device memory."""
        self.effect("st.global.v4.b32 [$0], {$1,$2,$3,$4};", address, *words)

    def store_device_word(self, address: Any, word: Any) -> None:
        """Store 32 bits to device memory."""
        self.effect("st.global.b32 [$0], $1;", address, word)

    def value(self, x: Any) -> Any:
        """Return the thread's value of an argument i32`[128]` with the layout `THREADS`."""
        return self._utils.bitcast(x.registers.item(), self._i32)

    def array(self, value: Any) -> Any:
        """Return an array i32`[128]` of the values of all threads."""
        from jax.experimental.mosaic import gpu as mgpu

        pair = self._ir.VectorType.get((1,), self._i32)
        registers = np.array([self._utils.bitcast(value, pair)], dtype=object)
        layout = THREADS.to_mgpu()
        shape = layout.registers_shape((WARPGROUP,))
        return mgpu.FragmentedArray(
            _registers=registers.reshape(shape), _layout=layout, _is_signed=True
        )

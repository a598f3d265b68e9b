"""CPU kernels whose result for a row never depends on the other rows.

build.py       compiles them on this machine and loads them, or says why not
ops.py         typed operators: 8-bit linear layers, attention over a tree, norms, top-k
decoder.py     a whole forward of a Llama-shaped decoder in one call
cpu.cpp        the C interface; the code is in the .hpp files beside it:
               simd -> linear -> rows -> attention -> decoder <- team (threads and barriers)
"""

from draftwood.kernels.build import load, why_unavailable

__all__ = ["load", "why_unavailable"]

"""How placement's kernels are compiled: `kernel`, and `inlined` for what is called within their loops.

Neither counts references. Numba counts those to arrays at each call of one compiled function by another, with locked
instructions, and a look-up of a prompt took twice as long for it as it does now. So what makes an array is no `kernel`
but plain `njit`, and should call few.
"""

from __future__ import annotations

from numba import njit

kernel = njit(_nrt=False)
inlined = njit(_nrt=False, forceinline=True)

"""Put faster versions in the place of functions of model.py: one call, made on a GPU.

From then on model.py computes norms, rotary positions and gated products without gradients by
Triton kernels, products with the same input at once, and attention by the masks of speed/masks.py;
fused_ce.py asks whether its kernels still compute what its plain function does. A function that was
edited or replaced stays, and a note names it: see runtime/fast.py.
"""

import functools

from torch import Tensor

import fused_ce
import model
from runtime.fast import FastVersion
from speed import kernels, masks


def by_kernel(version: FastVersion, plain):
    """Return a function that computes `plain`, without gradients by the kernel of `version`."""
    @functools.wraps(plain)
    def compute(*arguments):
        by_kernel = (kernels.KERNELS and any(isinstance(x, Tensor) and kernels.kernels_apply(x)
                                             for x in arguments) and version.stands_for(plain))
        return (version.kernel if by_kernel else plain)(*arguments)
    return compute


# {name in model.py: FastVersion}
KERNELS = {'norm': kernels.NORM, 'rotate': kernels.ROTATE, 'gate': kernels.GATE}
WHOLE = {'products': FastVersion(kernels.products, {'model.products': '5d4b9558'}),
         'float32_linear': FastVersion(kernels.float32_linear, {
             'model.float32_linear': 'a1914f28'}),
         'make_masks': FastVersion(masks.make_masks, {
             'attention.make_masks': '4fd2cc7a', **masks.SEEN})}
LOSS = FastVersion(fused_ce._kernels, {'fused_ce._plain': '4356f24f'})
_installed: dict = {}       # {name: (the plain function, what is in its place)}


def install():
    """Replace the functions of model.py that have a faster version; a second call is harmless."""
    fused_ce.stands_for = LOSS.stands_for
    for name, version in (KERNELS | WHOLE).items():
        plain = getattr(model, name)
        if name in _installed and plain is _installed[name][1]:
            continue
        if version.stands_for(plain):
            fast = by_kernel(version, plain) if name in KERNELS else version.kernel
            setattr(model, name, fast)
            _installed[name] = plain, fast

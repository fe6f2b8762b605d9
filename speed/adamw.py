"""AdamW on a CPU by torch's own fused update, which runtime/optim.py may call."""

from runtime import optim
from runtime.fast import FastVersion

ADAMW = FastVersion(optim.adamw, {'optim._adamw': 'e9aee728', 'optim.inverse': '0e8dd09a',
                                  'optim.root': '30324983'})


def install():
    """Let optim.py use the fused update where its plain one is unedited."""
    optim.stands_for = ADAMW.stands_for

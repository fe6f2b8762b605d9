"""The table of rooms: what the core opens by name, when a setting or a file asks for it.

The core imports nothing else of the other folders, and nothing of them is loaded before. A room of
your own is a row here.
"""

import importlib

# {name: module}
ROOMS = {
    # families of models that are no row of FAMILIES, by model_type
    **dict.fromkeys(('t5', 'mt5'), 'families.t5'),
    # after and beside training: reports, the model card, training on the answers of questions
    'reports': 'results.training_report', 'card': 'results.card', 'questions': 'data.trees',
    # models and datasets of the Hugging Face hub, adapters in PEFT's format, files of tokenizers
    'hub': 'runtime.hub', 'adapter': 'runtime.adapter', 'export': 'data.export',
}


def load(name):
    """Return the module of the room `name`."""
    return importlib.import_module(ROOMS[name])

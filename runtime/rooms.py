"""The table of rooms: what the core opens by name, when a setting or a file asks for it.

The core imports nothing else of the other folders, and nothing of them is loaded before. A room of
your own is a row here.
"""

import importlib

# {name of a task whose answers are written, or whose questions have another form: module with its
# class as TASK}
TASKS = {
    **dict.fromkeys(('triviaqa', 'nq_open', 'popqa', 'gsm8k', 'gsm8k_short', 'math500', 'humaneval',
                     'qa', 'triviaqa_train', 'nq_open_train', 'gsm8k_train'),
                    'written.tasks'),
    'p_ik': 'written.p_ik', 'judge': 'written.judges'}
# {key of a task's entry in results.json: module with the `notes` on it and its further `tables`}
RESULTS = {'judge': 'written.judging',
           **dict.fromkeys(('written', 'unparsed'), 'written.confidence')}
# {name: module}
ROOMS = TASKS | {
    'judging': 'written.judging', 'confidence': 'written.confidence',
    # variants of questions with options
    **dict.fromkeys(('permuted', 'p_true', 'contextual'), 'written.variants'),
    'show': 'data.show', 'written benchmarks': 'written.benchmarks',
    'compare': 'compare.compare', 'post hoc': 'compare.post_hoc', 'scaling': 'compare.scaling',
    # faster versions of the core, in speed/
    'fast versions': 'speed.install', 'kernels': 'speed.kernels', 'fp8': 'speed.fp8',
    'recorded passes': 'speed.graphs', 'compact': 'speed.compact',
    # families of models that are no row of FAMILIES, by model_type
    **dict.fromkeys(('t5', 'mt5'), 'families.t5'),
    # what measures samples once they are there
    'measures': 'results.evaluation', 'report': 'results.report',
    # after and beside training: reports, the model card, training on the answers of questions
    'reports': 'results.training_report', 'card': 'bridges.card', 'questions': 'data.trees',
    # models and datasets of the Hugging Face hub, adapters in PEFT's format, files of tokenizers
    'byte pairs': 'data.byte_pairs',
    'hub': 'bridges.hub', 'adapter': 'bridges.adapter', 'export': 'bridges.export',
}


def of_result(result):
    """Return the modules of RESULTS that a task's entry in results.json needs."""
    names = dict.fromkeys(module for key, module in RESULTS.items() if key in result)
    return [importlib.import_module(name) for name in names]


def load(name):
    """Return the module of the room `name`."""
    return importlib.import_module(ROOMS[name])

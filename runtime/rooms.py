"""The table of rooms: what the core opens by name, when a setting or a file asks for it.

The core imports nothing else of the other folders. A room of your own is a row here.
"""

import importlib

# {name of a task with written answers or other questions: module with its class as TASK}
TASKS = {
    **dict.fromkeys(('triviaqa', 'nq_open', 'popqa', 'gsm8k', 'gsm8k_short', 'math500', 'humaneval',
                     'qa', 'triviaqa_train', 'nq_open_train', 'gsm8k_train'),
                    'written.tasks'),
    'p_ik': 'written.p_ik', 'judge': 'written.judges',
    **dict.fromkeys(('clm', 'facts'), 'data.probes')}
# {key of a task's entry in results.json: room with the `notes` on it}
RESULTS = {'judge': 'judging', 'written': 'confidence', 'unparsed': 'confidence'}
# {name: module}
ROOMS = TASKS | {
    'judging': 'written.judging', 'confidence': 'written.confidence',
    # variants of questions with options
    **dict.fromkeys(('permuted', 'p_true', 'contextual'), 'written.variants'),
    'show': 'data.show', 'written benchmarks': 'written.benchmarks',
    'compare': 'compare.compare', 'post hoc': 'compare.post_hoc', 'scaling': 'compare.scaling',
    # faster versions of the core, in speed/
    'fast versions': 'speed.install', 'kernels': 'speed.kernels', 'fp8': 'speed.fp8',
    'recorded passes': 'speed.graphs', 'sharding': 'speed.sharding',
    'compact': 'speed.compact', 'fused AdamW': 'speed.adamw',
    # families of models that are no row of FAMILIES, by model_type
    **dict.fromkeys(('t5', 'mt5'), 'families.t5'),
    # what measures samples once they are there
    'measures': 'results.evaluation', 'report': 'results.report',
    # beside and after training
    'resume state': 'runtime.resume_state', 'base smoothing': 'runtime.base_smoothing',
    'questions': 'data.question_answers', 'texts': 'data.texts',
    'reports': 'results.training_report', 'card': 'bridges.card', 'trackers': 'bridges.trackers',
    # files of tokenizers, texts and tables
    'byte pairs': 'data.byte_pairs', 'sentence pieces': 'data.sentence_pieces',
    'other readers': 'runtime.other_readers',
    # models and datasets of the Hugging Face hub, adapters in PEFT's format, files for other tools
    'hub': 'bridges.hub', 'adapter': 'bridges.adapter', 'export': 'bridges.export',
}


def load(name):
    return importlib.import_module(ROOMS[name])

"""The settings of evaluate.py, and of the run that trained a model. Nothing here needs torch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.templates import TEMPLATES, missing_tokens
from runtime.config import require_given, require_range, run_folder, run_settings
from runtime.errors import ConfigError
from runtime.json_rules import check_values

# the settings of a run that decide how its model is used, with their values as in check_values
TRAINED = {'template': [str], 'data_kind': [str], 'add_bos': [bool, None], 'revision': [str, None]}


@dataclass
class EvalConfig:
    model: str = ''                           # a folder in Hugging Face layout, or a hub name
    revision: str | None = None               # the hub revision of the model
    tasks: tuple[str, ...] = ('mmlu',)        # names, also as task:folder-or-file; or files of
    #                                           questions
    data_revision: str | None = None          # the hub revision of the tasks' datasets
    languages: tuple[str, ...] = ('all',)     # languages of multilingual tasks
    # mmlu; harness: as lm-evaluation-harness; own: the benchmark's; or another of data/prompts.py
    prompt_format: str = 'mmlu'
    header: Literal['english', 'native', 'none'] = 'english'  # native: in the question's language
    shots: int | None = None                  # solved questions before each question; None: 5, or 0
    #                                           if each task is a file
    scoring: Literal['auto', 'letters', 'text'] = 'auto'     # auto: letters, or as the harness does
    norm: Literal['token', 'sum', 'char', 'byte'] = 'token'  # divisor of a log-probability
    dropout_seed: int | None = None           # for the dropout of adapters; None: no dropout
    p_true: bool = False                      # also ask whether the top option is right: P(True)
    n: int = 10                               # answers drawn per question without options
    max_tokens: int | None = None             # longest written answer; None: as its task says
    p_ik: bool = False                        # also predict if a drawn answer is right: P(IK)
    verbalized: bool = False                  # also ask how probable a written answer is
    run_code: bool = False                    # run programs that the model writes, for humaneval
    isolation: Literal['namespaces', 'limits'] = 'namespaces'  # see docs/running_code.md
    permute: int | None = None                # also ask in this many orders of the options
    contextual: bool = False                  # also divide by probabilities without a question
    # chat template of the prompt. model: the tokenizer's own; trained: that of the model's train.py
    # run; none: plain text; auto: the tokenizer's own, if it and not a run here brought it
    chat: Literal['auto', 'none', 'model', 'trained', *TEMPLATES] = 'auto'
    multiturn: bool = False                   # in a chat, each shot as a question and its answer
    instruct: bool = False                    # clm and facts: begin with the paper's instruction
    show: int = 0                             # print this many prompts per task instead of scoring
    limit: int | None = None                  # questions per language, over all subjects; None: all
    add_bos: bool | None = None               # begin with BOS; None: as in training or tokenizer
    max_length: int | None = None             # longest prompt in tokens; None: the model's context
    fit_temperature: bool = False             # also report temperature and Platt scaling
    group_by: str = ''                        # a field of the questions: also report by its values
    scaling: str | None = None                # a scaling.json to apply, such as another run's
    all_metrics: bool = False                 # results.json also has metrics that no table shows
    n_bootstrap: int = 1000                   # resamples for the intervals; 0: none
    pictures: bool = True                     # draw reliability diagrams
    pack_len: int | None = None               # tokens in a packed row; None: 4096 to 32768
    batch_rows: int = 1                       # rows per forward pass
    shard: bool = False                       # each process of torchrun holds a part of the weights
    deterministic: bool = False               # scores bitwise independent of batch composition
    on_bad_row: Literal['stop', 'skip'] = 'stop'  # skip: leave out bad rows and count them
    seed: int = 0                             # for clm's tokens, `limit` and the bootstrap
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # auto: bfloat16 on a GPU, else float32
    device: str = 'auto'                      # 'cpu', 'cuda', 'cuda:1'; auto: a GPU if there is one
    out_dir: str | None = None                # None: the model's folder; out/eval/ for a hub name
    overwrite: bool = False                   # rename an earlier out_dir to out_dir.1, or .2, ...


def check_eval_config(cfg):
    """Raise ConfigError for unusable values."""
    require_range(cfg, 0, math.inf, 'shots', 'show', 'n_bootstrap')
    require_range(cfg, 0, 2 ** 63 - 1, 'seed', 'dropout_seed')
    require_range(cfg, 1, math.inf, 'n', 'max_tokens', 'limit', 'batch_rows', 'max_length')
    require_range(cfg, 16, math.inf, 'pack_len')
    require_range(cfg, 2, 26, 'permute')
    require_given(cfg, tasks='mmlu,arc_easy or --tasks=my_questions.jsonl',
                  languages='all or --languages=en,de')


def check_report_config(cfg, data_kind):
    """Raise ConfigError for values unusable in the `eval` of a training run on `data_kind`."""
    given = [key for key in ('model', 'revision', 'out_dir', 'device', 'dtype', 'seed', 'overwrite')
             if getattr(cfg, key) != getattr(EvalConfig(), key)]
    if given:
        raise ConfigError(f'eval: {given[0]} is decided by the run; leave it out')
    if cfg.chat == 'trained' and data_kind != 'instruct':
        raise ConfigError(f"eval: chat = 'trained' needs data_kind = 'instruct': {data_kind!r} has "
                          f'no chat template')
    if cfg.dropout_seed is not None:
        raise ConfigError('eval: dropout_seed needs the adapters that a run saves at its end; '
                          'leave it out, then evaluate.py --model=out/run --dropout_seed=0')
    try:
        check_eval_config(cfg)
    except ConfigError as error:    # max_length and pack_len are keys of train.py as well
        raise ConfigError(f'eval: {error}') from None


def training_settings(folder):
    """Return the settings of the run that trained the model in `folder`; {} without a run."""
    folder = run_folder(Path(folder).resolve())
    settings = run_settings(folder)
    check_values(settings, TRAINED, folder / 'train_config.py')
    return settings


def pick_template(name, folder, tokenizer, otherwise=None):
    """Return the name of a chat template of the model in `folder`, for 'auto' and 'trained' that of
    the run that trained it here, else 'model', the tokenizer's own, else `otherwise`; ConfigError.
    """
    if name not in ('auto', 'trained'):
        return name
    settings = training_settings(folder)
    own = settings.get('template') if settings.get('data_kind') == 'instruct' else None
    if own in TEMPLATES and not (missing_tokens(own, tokenizer) and tokenizer.chat_templates):
        return own
    if tokenizer.chat_templates and (own or name == 'auto'):    # a run can have left it here
        return 'model'
    if otherwise:
        return otherwise
    why, own = ('', 'model') if tokenizer.chat_templates else ('brings no chat template and ', '')
    raise ConfigError(f'{folder} {why}was not trained here on conversations; name the template, '
                      f'for example --chat={own or "tulu"}, or use plain text: --chat=none in '
                      f'evaluate.py, --raw in sample.py and generate.py')


def pick_chat(name, folder, tokenizer):
    """Return the `chat` of an evaluation of the model in `folder`, for 'auto' too. A model that was
    trained here is asked as its base model was: in plain text if that brought no template.
    """
    if name == 'auto' and training_settings(folder).get('template', 'model') != 'model':
        return 'none'
    return pick_template(name, folder, tokenizer, otherwise='none' if name == 'auto' else None)

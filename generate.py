"""Generate answers to many prompts at once, with a KV cache.

    python generate.py --model=out/run --prompts=prompts.jsonl --out=answers.jsonl --n=8
    torchrun --nproc_per_node=8 -- generate.py --model=out/run --prompts=prompts.jsonl --n=8

A row of prompts.jsonl has `prompt`, or `messages` of a conversation, and perhaps an `id`; its other
fields are copied. The row of answers.jsonl adds `answers`. An interrupted command resumes from that
file. Each of several processes answers its share of the prompts. How answers are computed is in
decoding/answers.py.
"""

from runtime import cli

if __name__ == '__main__':
    cli.begin()

import itertools
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from data.eval_config import pick_template, training_settings
from decoding.sampling import DecodingConfig, check_decoding
from runtime.config import load_config, require_given
from runtime.errors import CheckpointError, ConfigError, DataError


@dataclass
class GenerateConfig(DecodingConfig):
    prompts: str = ''                   # a file of rows with `prompt` or `messages`
    out: str = 'answers.jsonl'          # file of the answers, *.jsonl
    confidence: bool = False            # score each answer once more, as evaluate.py scores options
    per_token: bool = False             # write each token with its log-probabilities and entropy
    overwrite: bool = False             # rename earlier answers to answers.1.jsonl, ...


# answers depend on these keys, so they must not change within a file
SETTINGS = ('n', 'max_tokens', 'temperature', 'top_k', 'top_p', 'min_p', 'stop', 'seed',
            'deterministic', 'confidence', 'per_token')


def read_arguments(argv):
    """Return the GenerateConfig of a command line; raise ConfigError for unusable values."""
    cfg = load_config(GenerateConfig, argv, __doc__)
    check_decoding(cfg)
    require_given(cfg, prompts='prompts.jsonl')
    if not cfg.out.endswith('.jsonl'):      # the names of the files beside it follow from it
        raise ConfigError(f'out = {cfg.out!r}; it must end in .jsonl, as answers.jsonl does')
    return cfg


if __name__ == '__main__':
    with cli.one_line_errors():     # --help and misspelled keys need no torch
        read_arguments(sys.argv[1:])

from data.chat import encode_prompt
from data.files import dialogue, parsed, read_rows
from data.messages import read_turns, take_tools, with_context, without_nulls
from data.tokenizer import begins_with_bos, load_model_tokenizer
from data.trees import question_frame
from decoding.answers import generate, to_row
from decoding.slots import room
from results.samples import (OUTPUTS, append_line, claim_lines, digest, merge_parts, merged_names,
                             open_lines, part, read_jsonl, with_parts)
from runtime import checkpoint, ownership, parallel, weights
from runtime.device import pick_device, pick_dtype
from scoring import confidences


def open_model(cfg):
    """Return (folder, model, tokenizer, template, add_bos); template '' is plain text."""
    device = pick_device(cfg.device)
    with parallel.first_process_first():
        folder = checkpoint.fetch(cfg.model, cfg.revision)
    config = checkpoint.read_config(folder)
    with ThreadPoolExecutor(1) as pool:     # reads the weights while the tokenizer is made
        model = pool.submit(checkpoint.load, folder, device, pick_dtype(cfg.dtype, device))
        tokenizer = load_model_tokenizer(folder, config)
        template = '' if cfg.raw else pick_template(cfg.chat, folder, tokenizer)
        add_bos = begins_with_bos(tokenizer, training_settings(folder).get('add_bos'))
        if template:
            question_frame(tokenizer, template, add_bos)    # raise for a template that does not fit
        return folder, model.result().eval(), tokenizer, template, add_bos


def read_prompts(path, tokenizer, template, add_bos):
    """Return ([(row, token ids)], the ids that end an answer) of a file with prompts to answer, in
    plain text for the template ''. Raises DataError with file and line.
    """
    prompts = []
    stop = {*tokenizer.end_ids}
    places = {}

    def parse(row, place):
        given, tools = take_tools(without_nulls(row))
        if ('prompt' in given) == ('messages' in given) or 'answers' in given:
            raise DataError(f'fields {", ".join(row) or "(none)"}; wanted either "prompt" or '
                            f'"messages", and no "answers"')
        id = given.get('id', str(len(prompts)))
        if type(id) not in (str, int):
            raise DataError(f'the id {id!r} is neither text nor a whole number')
        if places.setdefault(id, place) != place:
            raise DataError(f'the id {id!r} is already at {places[id]}')
        name = 'messages' if 'messages' in given else 'prompt'
        turns = (read_turns(given[name], f'"{name}"', 'user') if template or name == 'messages'
                 else dialogue(given[name]))    # a plain text is encoded as it is
        messages = with_context(given, turns)
        if (role := messages[-1]['role'] if messages else None) != 'user':
            raise DataError(f"the last message must have the role 'user', not {role!r}")
        if not template and ('messages' in given or len(messages) > 1 or tools):
            raise DataError('"messages", a system message, tools and a history need a template: '
                            'leave out --raw')
        return row | {'id': id}, *encode_prompt(messages, tokenizer, template, add_bos, tools)

    for place, row in read_rows(path):
        entry = parsed(place, row, parse, place)
        if isinstance(entry, DataError):
            raise entry
        prompts.append(entry[:2])
        stop |= entry[2]
    if not prompts:
        raise DataError(f'{path} has no rows')
    return prompts, stop


def open_answers(cfg, settings, processes):
    """Prepare the file `out` of generate.py; return {(id, hash of the prompt)} of its rows."""
    out = Path(cfg.out)
    config, advice = f'{out.stem}.config.json', 'choose another --out, or --overwrite'
    names, listed = (out.name, config), ownership.written_files(out.parent)
    # log.jsonl and samples.jsonl grow; see train.py and evaluate.py
    if out.name in ('log.jsonl', OUTPUTS[0]) or (out.name in listed) != (config in listed):
        raise ConfigError(f'{out} has the name of a file that another script writes, and is not '
                          f'replaced; choose another --out, such as answers.jsonl')
    ownership.check_free(out.parent, *names)
    if cfg.overwrite:
        ownership.rename_old(*map(out.with_name, (*names, *merged_names(out))))
    open_lines(out.parent, names, settings, 'answers', advice, processes)
    done = {(row['id'], row['prompt_hash']) for _, row in read_jsonl(*with_parts(out))}
    claim_lines(out.parent, names, settings, processes)
    return done


def answer_rows(model, prompts, cfg, tokenizer, stop):
    """Yield (index of the prompt, the rows of its n answers in the file) as they are done."""
    answered = generate(model, prompts, cfg, tokenizer, stop)
    while group := [*itertools.islice(answered, 32 if cfg.confidence else 1)]:
        scored = [[None] * cfg.n]
        if cfg.confidence:
            scored = confidences(model, [prompts[i] for i, _ in group],
                                 [answers for _, answers in group], cfg.deterministic)
        for (i, answers), log_probs in zip(group, scored):
            yield i, [to_row(*pair, cfg.per_token) for pair in zip(answers, log_probs)]


def main(argv):
    cfg = read_arguments(argv)
    cfg = replace(cfg, prompts=os.path.expanduser(cfg.prompts), out=os.path.expanduser(cfg.out))
    ownership.INPUTS.clear()
    folder, model, tokenizer, template, add_bos = open_model(cfg)
    prompts, stop = read_prompts(cfg.prompts, tokenizer, template, add_bos)
    try:
        room(model, [ids for _, ids in prompts], cfg)       # before any file is written
    except DataError as error:
        raise DataError(f'{cfg.prompts}: {error}') from None
    prompts = [(row | {'prompt_hash': digest(ids)}, ids) for row, ids in prompts]
    settings = {key: getattr(cfg, key) for key in SETTINGS} | {
        'stop': [*cfg.stop], 'template': template, 'add_bos': add_bos} | checkpoint.identity(
        folder, tokenizer, model.head.dtype, 'decoding.answers', 'scoring') | {
        'end_ids': sorted(stop)}        # with that of the template
    out = Path(cfg.out)
    rank = parallel.rank()
    n_processes = parallel.world_size()
    with parallel.first_process_locks(out.parent):
        done = parallel.gather(open_answers(cfg, settings, n_processes) if rank == 0 else None)[0]
        left = [(row, ids) for row, ids in prompts if (row['id'], row['prompt_hash']) not in done]
        print(f'to answer: {len(left):,} of {len(prompts):,} prompts, {cfg.n} times each',
              flush=True)
        if others := len(done) - (len(prompts) - len(left)):
            print(f'{out} also has {others:,} rows for prompts that are not in {cfg.prompts}')
        left = left[rank::n_processes]
        n_tokens = 0
        started = time.perf_counter()
        ids = [ids for _, ids in left]
        try:
            with (parallel.progress_bar('answers', len(left), 'prompts') as progress,
                  open(part(out, rank, n_processes), 'ab', buffering=0) as file):
                for i, rows in answer_rows(model, ids, cfg, tokenizer, stop):
                    append_line(file, left[i][0] | {'answers': rows})
                    n_tokens += sum(row['n_tokens'] for row in rows)
                    progress.update()
        except FloatingPointError as error:
            row, _ = left[error.args[0]]
            raise CheckpointError(weights.bad_logits(
                f'the prompt with id {row["id"]!r}', folder, settings['dtype'])) from error
        n_tokens = sum(parallel.gather(n_tokens))
        if rank == 0:
            merge_parts(out)
    seconds = time.perf_counter() - started
    print(f'wrote {cfg.out}: {n_tokens:,} tokens in {seconds:.1f} s, {n_tokens / seconds:,.0f} '
          f'tokens/s')


if __name__ == '__main__':
    with cli.one_line_errors(resume='finished prompts are kept, and the same command resumes there',
                             memory='lower --batch_size or --max_tokens'), parallel.joined():
        main(sys.argv[1:])

"""Load preferences: answers to one prompt, ranked, in the formats in which they are published.

One sequence of the cache is a prompt and all its answers, the best first:

    tokens      prompt, answer 0, answer 1, ...
    loss mask   0 in the prompt, k + 1 in answer k; TIED is added if it is as good as answer k - 1
"""

import itertools
import json
import re
from dataclasses import dataclass

import numpy as np

from data.cache import group, tokenize_once
from data.chat import chat_of, encode_answer
from data.files import as_rows, has_fields, parsed, require_text, training_rows
from data.instruct import PATTERNS
from data.messages import (LISTS, QUESTIONS, first_prompt, read_turns, require_contained,
                           to_question, with_context, without_nulls)
from data.tree_rows import Tree
from runtime.errors import DataError
from runtime.sources import fetch_training

TIED = 128      # so a prompt has at most 126 answers
HELPSTEER2 = 'prompt', 'response', 'helpfulness'    # a row per answer
SUBJECT = 'subject', 'subset', 'domain'     # fields of a row, for judges
VERDICTS = 'status', 'winner', 'preference', 'verdict', 'outcome', 'label'    # Argilla: status
TIE = re.compile(r'(?i)\s*(a )?(tied?|draw|equal)\b')
PREFERENCE_PATTERNS = ('data/train_prefs-*.parquet', 'train_prefs-*.parquet',
                       'comparison_data_v2.json', *PATTERNS)


@dataclass
class Ranking:
    """A prompt and its answers, the best first; answers with equal scores are tied."""
    prompt: list        # [{'role', 'content'}, ...]
    answers: list       # texts
    scores: list        # numbers that only order them
    margin: float = 0.0     # by which the better of two answers' rewards must exceed the other


# ---- Rows of the published formats ---------------------------------------------------------------

def to_ranking(row):
    """Return the Ranking of a row in one of FORMATS, see docs/alignment.md; raises DataError."""
    row = without_nulls(row)
    formats = [fields for fields in FORMATS if row.keys() >= {*fields}]
    if not formats:
        raise DataError(f'fields {", ".join(map(str, row)) or "(none)"}; wanted '
                        + ', or '.join(' + '.join(needed) for needed in FORMATS)
                        + ', or prompt + response + helpfulness in a row per answer')
    needed, *others = formats
    prompt, answers, scores = FORMATS[needed](row)
    if other := next((fields for fields in others if fields[-1] != needed[-1]), None):
        worse = {(b, a) for a, b in _better(*FORMATS[other](row)[1:])}
        if worse & _better(answers, scores):
            raise DataError(f'"{needed[-1]}" and "{other[-1]}" of the row rank the answers '
                            f'differently; keep one of them')
    for name in {*LISTS} & row.keys() - {*needed}:
        turns = read_turns(row[name], f'"{name}"')
        require_contained({'prompt': prompt}, turns or prompt)
    if len(answers) == 2 and (row.get('tie') is True or row.get('is_tie') is True or any(
            TIE.match(str(row.get(name))) for name in VERDICTS)):
        scores = [0, 0]
    prompt = with_context(row, prompt, (*needed, 'input') if 'instruction' in needed else needed,
                          answers)
    if any(message.get('train') for message in prompt):
        raise DataError('a message before the answers is marked as trained, but only the answers '
                        'are trained')
    return Ranking(prompt, answers, scores, _margin(row, answers))


def _better(answers, scores):
    """Return {(better answer, worse one)}."""
    pairs = itertools.permutations(zip(answers, scores), 2)
    return {(a, b) for (a, high), (b, low) in pairs if high > low}


def _margin(row, answers):
    margin = row.get('margin', 0.0)
    if type(margin) not in (int, float) or not abs(margin) <= 1e18:
        raise DataError(f'"margin" must be a number of at most 1e18, got {margin!r:.60}')
    if 'margin' in row and len(answers) != 2:
        raise DataError('"margin" needs a pair of answers; leave it out of other rows')
    return float(margin)


def _pair(row):
    chosen, rejected = (read_turns(row[side], side, 'assistant') for side in ('chosen', 'rejected'))
    names = ['conversations', *QUESTIONS, 'messages', *['input'] * ('instruction' not in row)]
    before = read_turns(next(filter(None, map(row.get, names)), []), 'the prompt', 'user')
    if not before and 'instruction' in row:
        before = [to_question(row)]
    if len(chosen) > 1 or len(rejected) > 1:    # the sides hold the prompt themselves
        if chosen[:-1] != rejected[:-1]:
            raise DataError('the turns before the two answers differ')
        before = join_turns(before, chosen[:-1])
    for side, messages in (('chosen', chosen), ('rejected', rejected)):
        last = messages[-1] if messages else {'role': None}
        if last['role'] != 'assistant' or last.get('train') is False:
            raise DataError(f'the last turn of "{side}" is not an answer of the assistant that is '
                            f'trained')
        if others := last.keys() - {'role', 'content', 'train'}:
            raise DataError(f'"{min(others)}" of the answer in "{side}" is not compared; write it '
                            f'into the content, or remove it')
    if not before:
        raise DataError('"chosen" and "rejected" without "prompt" must be dialogues of '
                        '"\\n\\nHuman: " and "\\n\\nAssistant: "')
    # scores only tell a tie: they can be those of a judge that did not choose
    tied = any(key in row and row[key] == row.get(key.replace('chosen', 'rejected')) for key in (
        'score_chosen', 'chosen_score', 'rating_chosen', 'chosen_rating', 'chosen-rating'))
    return before, [chosen[-1]['content'], rejected[-1]['content']], [1, int(tied)]


def join_turns(prompt, turns):
    """Return the messages of a prompt and of turns that repeat it, or its end, or continue it."""
    said, asked = ([(turn['role'], str(turn['content']).strip()) for turn in part]
                   for part in (turns, prompt))
    if any(said[i:i + len(asked)] == asked for i in range(len(said))):
        return turns
    if len(asked) == 1 and any(role == 'user' == asked[0][0] and asked[0][1] in text
                               for role, text in said):
        return turns
    overlap = next(n for n in range(len(said), -1, -1) if said[:n] == asked[len(asked) - n:])
    joined = [*prompt, *turns[overlap:]]
    roles = [turn['role'] for turn in joined]
    if any(one == other for one, other in itertools.pairwise(roles)) or 'system' in roles[1:]:
        raise DataError('"chosen" and "rejected" of several turns neither repeat nor continue the '
                        'prompt; keep one of them')
    return joined


def _gpt4llm(row):
    # a template would add the text around Stanford Alpaca's instruction again
    match = re.fullmatch(r'Below is an instruction that describes a task.*?### Instruction:\s*(.*?)'
                         r'(?:\s*### Input:\s*(.*?))?\s*(?:### Response:\s*)?',
                         require_text(row['user_input'], 'user_input'), re.DOTALL)
    instruction, context = match.groups() if match else (row['user_input'], None)
    prompt = [to_question({'instruction': instruction, 'input': context})]
    if 'responses_and_scores' not in row:
        return prompt, [row['completion_a'], row['completion_b']], [1, 0]
    answers = as_rows(row['responses_and_scores'])
    if not isinstance(answers, list) or not all(has_fields(x, 'response', 'score')
                                                for x in answers):
        raise DataError('"responses_and_scores" must be a list of {"response", "score"}')
    return prompt, *([answer[key] for answer in answers] for key in ('response', 'score'))


def _two(question, first, second, better, middle):
    return {(question, first, second, better): lambda row: (
        read_turns(row[question], f'the {question}', 'user'), [row[first], row[second]],
        [middle, row[better]])}


# {fields: row -> (prompt, answers, scores)}; the first whose fields a row has
FORMATS = {
    ('prompt', 'responses', 'scores'): lambda row: (        # and HelpSteer2, by `join_answers`
        read_turns(row['prompt'], 'the prompt', 'user'), row['responses'], row['scores']),
    ('instruction', 'generations', 'ratings'): lambda row: (        # distilabel
        [to_question(row)], row['generations'], row['ratings']),
    ('instruction', 'completions'): lambda row: (       # UltraFeedback before it was binarized
        [to_question(row)], [x['response'] for x in as_rows(row['completions'])],
        [x['overall_score'] for x in as_rows(row['completions'])]),
    ('prompt', 'turns', 'answers'): lambda row: (       # Nectar; rank 1 is the best
        read_turns(row['prompt'], 'the prompt', 'user'),
        [x['answer'] for x in as_rows(row['answers'])],
        [-x['rank'] for x in as_rows(row['answers'])]),
    ('user_input', 'responses_and_scores'): _gpt4llm,
    ('user_input', 'completion_a', 'completion_b'): _gpt4llm,       # as it was published before
    # HelpSteer3 and HelpSteer2: -3 to 3, negative if the first is better; PKU-SafeRLHF: 0 or 1
    **_two('context', 'response1', 'response2', 'overall_preference', 0),
    **_two('prompt', 'response_1', 'response_2', 'preference_strength', 0),
    **_two('prompt', 'response_0', 'response_1', 'better_response_id', 0.5),
    ('conversations', 'chosen', 'rejected'): _pair,     # ShareGPT
    ('prompt', 'chosen', 'rejected'): _pair,            # UltraFeedback and Tulu 3
    ('instruction', 'chosen', 'rejected'): _pair,       # Alpaca's fields, with `input`
    ('chosen', 'rejected'): _pair,      # HH-RLHF: dialogues, as text or messages; other prompts
}


def join_answers(rows):
    """Yield (place, row) pairs; HelpSteer2's rows, one per answer, are joined by their prompt."""
    prompts = {}

    def add(row, place):
        prompt, response = (require_text(row[key], key) for key in ('prompt', 'response'))
        _margin(row, [response])
        messages = with_context(row, read_turns(prompt, 'the prompt', 'user'), answers=[response])
        joined = {name: row[name] for name in (*SUBJECT, 'language') if name in row} | {
            'prompt': messages, 'responses': [], 'scores': []}
        _, joined = prompts.setdefault(json.dumps(messages), (place, joined))
        joined['responses'].append(response)
        joined['scores'].append(row['helpfulness'])

    for place, row in rows:
        # parquet gives every row all columns
        if not has_fields(row, *HELPSTEER2) or None in map(row.get, HELPSTEER2):
            yield place, row
        elif error := parsed(place, without_nulls(row), add, place):
            yield place, error
    yield from prompts.values()


# ---- From rankings to sequences and trees --------------------------------------------------------

def load_preferences(source, tokenizer, *, template, max_length, pack_len, add_bos, revision=None,
                     **options):
    """Return the Sequences of the rankings in `source`, a file, a folder or a hub dataset.

    max_length: tokens of the prompt with any one answer; longer answers are left out, not cut
    pack_len:   tokens of the prompt with all its answers, which share a row
    options:    those of `tokenize_once`
    """
    files = fetch_training(source, PREFERENCE_PATTERNS, revision)

    def encode(row, place):
        ranking = to_ranking(row)
        sequences = encode_ranking(ranking, tokenizer, template, add_bos, max_length)
        if isinstance(sequences, str):
            return sequences
        if len(sequences[0][0]) > pack_len:
            return f'all answers longer than {pack_len} tokens'
        prompt = group(first_prompt(ranking.prompt))
        return [(prompt, *sequence, ranking.margin) for sequence in sequences]

    settings = {'template': chat_of(tokenizer, template, add_bos).digest,
                'max_length': max_length, 'pack_len': pack_len, 'add_bos': add_bos}
    return tokenize_once(files, encode, tokenizer, settings, **options,
                         read=lambda *source: join_answers(training_rows(*source)))


def scored_answers(ranking):
    """Return [(answer, score)] of a Ranking: each different answer once, with its best score, but
    no empty one. Raises DataError.
    """
    answers, scores = ranking.answers, ranking.scores
    if not isinstance(answers, list) or not isinstance(scores, list) or (
            len(answers) != len(scores)
            or not all(isinstance(score, (int, float)) and score == score for score in scores)):
        raise DataError(f'wanted lists of answers and of their scores, numbers, got '
                        f'{answers!r:.60} and {scores!r:.60}')
    if not ranking.prompt or ranking.prompt[-1]['role'] != 'user':
        raise DataError('the last turn of the prompt is not the user\'s')
    best = {}
    for answer, score in zip(answers, scores, strict=True):
        if text := require_text(answer, 'an answer').strip():
            best[text] = max(best.get(text, (answer, score)), (answer, score), key=lambda x: x[1])
    return [*best.values()]


def encode_ranking(ranking, tokenizer, template, add_bos, max_length):
    """Return [(tokens, loss mask)] of a Ranking, or why it holds no preference, a text."""
    answers = sorted(scored_answers(ranking), key=lambda pair: -pair[1])
    if len(answers) < 2:
        return 'fewer than two different answers'
    encoded = [(score, *encode_answer(ranking.prompt, text, tokenizer, template, add_bos))
               for text, score in answers]
    encoded = [(score, prompt, answer) for score, prompt, answer in encoded
               if len(prompt) + len(answer) <= max_length]
    if len(encoded) < 2:
        return f'longer than {max_length} tokens'
    if len({score for score, _, _ in encoded}) < 2:
        return 'answers of equal score'
    if len(encoded) >= TIED - 1:
        raise DataError(f'{len(encoded)} answers to one prompt; at most {TIED - 2} are possible')
    prompt = encoded[0][1]
    tokens, loss_mask = [*prompt], [0] * len(prompt)
    for k, (score, _, answer) in enumerate(encoded):
        tokens += answer
        tied = k > 0 and score == encoded[k - 1][0]
        loss_mask += [k + 1 + TIED * tied] * len(answer)
    return [(tokens, loss_mask)]


def to_tree(tokens, loss_mask):
    """Return (Tree with the answers, their ranks from 0, equal if tied), both the best first."""
    tokens = tokens.tolist()
    starts = np.flatnonzero(np.diff(loss_mask, prepend=0))
    ends = [*starts[1:], len(tokens)]
    answers = [tokens[start:end] for start, end in zip(starts, ends, strict=True)]
    ranks = np.cumsum(loss_mask[starts] < TIED) - 1
    begin = int(starts[0])
    return Tree((), tokens[:begin], answers, [begin] * len(answers)), ranks

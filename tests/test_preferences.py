"""data/preferences.py: each published format, what is left out, and the trees."""

import math

import numpy as np
import pytest
from common import cases_of, write_rows

from data.chat import encode_conversation, encode_prompt
from data.preferences import (TIED, Ranking, encode_ranking, join_answers, load_preferences,
                              to_ranking, to_tree)
from runtime.errors import DataError

PROMPT = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Name a color.'}]


def said(role, text):
    return {'role': role, 'content': text}


ROWS = cases_of('preference_rows.json')     # by layout


@pytest.fixture
def tokenizer(tokenizers):
    return tokenizers['llama2']


def encoded(row, tokenizer):
    """Return (texts of the answers in their order, ranks) of a row, or why it is left out."""
    sequences = encode_ranking(to_ranking(row), tokenizer, 'tulu', True, 512)
    if isinstance(sequences, str):
        return sequences
    tree, ranks = to_tree(*(np.array(x) for x in sequences[0]))
    assert all(leaf[-1] == tokenizer.eos_id for leaf in tree.continuations)
    return [tokenizer.decode(leaf[:-1], start=False) for leaf in tree.continuations], [*ranks]


@pytest.mark.parametrize('name', ROWS)
def test_the_better_answer_of_each_published_format_comes_first(name, tokenizer):
    prompt = to_ranking(ROWS[name]).prompt
    assert prompt in (PROMPT, PROMPT[1:])
    three = name == 'GPT-4-LLM'
    answers = ['Red.', 'Blue.', 'Seven.'] if three else ['Red.', 'Seven.']
    assert encoded(ROWS[name], tokenizer) == (answers, [0, 0, 1] if three else [0, 1])


BETTER_FIRST = ['Red.', 'Seven.'], [0, 1]


@pytest.mark.parametrize('change, outcome', [
    ({'score_chosen': 1, 'score_rejected': 2}, BETTER_FIRST),
    ({'score_chosen': 2, 'score_rejected': 2}, 'answers of equal score'),
    ({'chosen-rating': 2, 'rejected-rating': 2}, 'answers of equal score'),     # Argilla's
    ({'chosen_score': 2, 'rejected_score': 2}, 'answers of equal score'),       # RLHFlow's
    ({'status': 'tie'}, 'answers of equal score'), ({'status': 'unchanged'}, BETTER_FIRST),
    ({'score_chosen': None, 'score_rejected': None}, BETTER_FIRST),
    ({'score_chosen': math.nan, 'score_rejected': math.nan}, BETTER_FIRST),
    ({'rejected': [PROMPT[1], said('assistant', ' Red.\n')]}, 'fewer than two different answers'),
    ({'rejected': [PROMPT[1], said('assistant', 'Blue, ' * 300)]}, 'longer than 512 tokens')])
def test_the_chosen_answer_is_the_better_one_or_the_row_is_left_out(change, outcome, tokenizer):
    assert encoded(ROWS['UltraFeedback'] | change, tokenizer) == outcome


@pytest.mark.parametrize('template', ['tulu', 'mistral_v1', 'alpaca'])
def test_prompt_and_answers_have_the_tokens_of_generation_and_of_training(template, tokenizer):
    messages = [said('user', 'Name a color.')]
    if template != 'alpaca':
        messages = [said('user', 'Hi.'), said('assistant', 'Hello.'), *messages]
    ((tokens, loss_mask),) = encode_ranking(
        Ranking(messages, ['Red, of course.', 'Seven'], [1, 0]), tokenizer, template, True, 512)
    tree, _ = to_tree(np.array(tokens), np.array(loss_mask, dtype=np.uint8))
    assert tree.prompt == encode_prompt(messages, tokenizer, template)[0]
    for leaf, answer in zip(tree.continuations, ('Red, of course.', 'Seven'), strict=True):
        ids, supervised = encode_conversation([*messages, said('assistant', answer)], tokenizer,
                                              template)
        assert tree.prompt + leaf == ids
        assert sum(supervised) >= len(leaf) == len(ids) - len(tree.prompt)


SIDES = {side: [PROMPT[1], said('assistant', text)]
         for side, text in (('chosen', 'Red.'), ('rejected', 'Seven.'))}
BRIEF, EARLIER = PROMPT[0], [said('user', 'Hi.'), said('assistant', 'Hello.')]
PAIR = {'chosen': 'Red.', 'rejected': 'Seven.'}
LATER = {side: [said('assistant', 'Hello.'), *turns] for side, turns in SIDES.items()}


@pytest.mark.parametrize('row, message', [
    ({'prompt': 'a'}, 'fields prompt; wanted prompt + responses + scores, or'),
    (ROWS['scores'] | {'tools': 'f(x)'}, 'the field "tools" is in no message'),
    ({'chosen': '\n\nHuman: x\n\nAssistant: y', 'rejected': '\n\nHuman: z\n\nAssistant: y'},
     'the turns before the two answers differ'),
    ({'prompt': [said('assistant', 'a')], 'chosen': 'b', 'rejected': 'c'},
     "the last turn of the prompt is not the user's"),
    ({'prompt': 'Why?'} | SIDES, 'neither repeat nor continue the prompt'),
    ({'prompt': [said('user', 'Why?')], 'system': 'c'} | SIDES, 'neither repeat nor continue'),
    (ROWS['UltraFeedback'] | {'messages': [said('user', 'Name a bird.')]},
     '"prompt" of the row is not in its turns'),
    (ROWS['prompt as text'] | {'initial_reason_steps': 'Step 1:'}, 'begins the answer and is not'),
    ({'prompt': 'a', 'chosen': [said('assistant', 'Red.') | {'weight': 0}], 'rejected': 'c'},
     'the last turn of "chosen" is not an answer of the assistant that is trained'),
    (ROWS['GPT-4-LLM'] | {'margin': 1}, '"margin" needs a pair of answers'),
    (ROWS['HH-RLHF'] | {'margin': math.inf}, '"margin" must be a number of at most 1e18, got inf'),
    # two names of one thing
    (ROWS['prompt as text'] | {'question': 'Name a bird.'}, '"question" is in no message (read f'),
    (ROWS['scores'] | {'chosen': 'Seven.', 'rejected': 'Red.'},
     '"scores" and "rejected" of the row rank the answers differently'),
    ({'prompt': [EARLIER[0], EARLIER[1] | {'weight': 1}, PROMPT[1]]} | PAIR, 'only the answers')])
def test_a_malformed_row_says_what_is_wrong(row, message, tokenizer):
    with pytest.raises(DataError) as error:
        encode_ranking(to_ranking(row), tokenizer, 'tulu', True, 512)
    assert message in str(error.value)


@pytest.mark.parametrize('name, field', [
    ('Nectar', 'answers'), ('UltraFeedback of before', 'completions'),
    ('GPT-4-LLM', 'responses_and_scores')])
def test_a_dict_of_lists_is_a_list_of_answers(name, field):
    answers = ROWS[name][field]
    columns = {key: [answer[key] for answer in answers] for key in answers[0]}
    assert to_ranking(ROWS[name] | {field: columns}) == to_ranking(ROWS[name])


@pytest.mark.parametrize('row, before', [
    # turns before the answers in `prompt` that both sides repeat, or continue
    ({'prompt': PROMPT} | SIDES, [BRIEF]), ({'prompt': EARLIER} | SIDES, EARLIER),
    ({'prompt': 'Hi.'} | LATER, EARLIER), ({'prompt': [BRIEF]} | SIDES, [BRIEF]),
    ({'prompt': [*EARLIER, PROMPT[1]]} | SIDES, EARLIER),
    ({'prompt': EARLIER} | LATER, EARLIER),
    ({'prompt': 'Hi.\n<extra_id_1>Assistant\nHello.\n<extra_id_1>User\nName a color.'} | PAIR,
     EARLIER),
    ({'prompt': 'Name a color.', 'prefill': 'Re'} | PAIR | {'rejected': 'Reality.'}, []),
    ({'system': 'Be brief.', 'question': 'Name a color.', 'chosen_rating': None} | PAIR, [BRIEF]),
    ({'instruction': 'Name a color.', 'input': '', 'system': None, 'history': [['Hi.', 'Hello.']]}
     | PAIR, EARLIER),
    (ROWS['scores'] | PAIR | {'system': 'Be brief.'}, [BRIEF]),     # ranked twice, but alike
    *[(row | {'system_prompt': 'Be brief.', 'tools': [], 'images': None}, [BRIEF])
      for row in ROWS.values()]])
def test_context_beside_a_pair_precedes_it(row, before):
    assert to_ranking(row).prompt == [*before, said('user', 'Name a color.')]


def test_an_earlier_answer_of_a_pair_is_not_trained(tokenizer):
    prompt = [EARLIER[0], EARLIER[1] | {'weight': 0}, PROMPT[1]]
    plain = Ranking([*EARLIER, PROMPT[1]], ['Red.', 'Seven.'], [1, 0])
    ours, wanted = (encode_ranking(ranking, tokenizer, 'tulu', True, 512)
                    for ranking in (to_ranking({'prompt': prompt} | PAIR), plain))
    assert ours == wanted


def test_helpsteer2_joins_the_answers_of_a_prompt_and_a_system_message():
    row = {'prompt': 'Name a color.', 'correctness': 4}
    rows = [('f:1', row | {'response': 'Seven.', 'helpfulness': 0}),
            ('f:2', {'prompt': 'x', 'response': 'y', 'helpfulness': 3}),
            ('f:3', row | {'response': 'Red.', 'helpfulness': 4}),
            ('f:4', row | {'response': 'Blue.', 'helpfulness': 2, 'system': 'Be brief.'})]
    (place, joined), (other, _), (_, brief) = join_answers(rows)
    turns = {'prompt': 'a\n<extra_id_1>Assistant\nb\n<extra_id_1>User\nc', 'response': 'd',
             'helpfulness': 1}
    ((_, several),) = join_answers([('f:1', turns)])
    assert several['prompt'] == [said('user', 'a'), said('assistant', 'b'), said('user', 'c')]
    assert (place, other) == ('f:1', 'f:2')
    assert to_ranking(joined) == Ranking(PROMPT[1:], ['Seven.', 'Red.'], [0, 4])
    assert to_ranking(brief) == Ranking(PROMPT, ['Blue.'], [2])


def test_a_file_of_preferences_has_margins_and_its_gaps_are_counted(tokenizer, tmp_path, capsys):
    pairs = [row for name, row in ROWS.items() if name != 'GPT-4-LLM']
    write_rows(tmp_path / 'pairs.jsonl', [
        *(row | {'margin': margin} for row in pairs for margin in (1.5, 2, None)),
        ROWS['GPT-4-LLM'], {'prompt': 'a', 'chosen': 'b', 'rejected': 'b'}])
    for _ in range(2):      # tokenized, then from the cache
        sequences = load_preferences(
            str(tmp_path / 'pairs.jsonl'), tokenizer, template='tulu', add_bos=True,
            max_length=512, pack_len=1024, cache_dir=str(tmp_path / 'cache'))
        assert sequences.margins.tolist() == [1.5, 2, 0] * len(pairs) + [0]
        assert sequences[len(sequences) - 1][1].max() == TIED + 2
        assert '1 rows left out: fewer than two different answers' in capsys.readouterr().out

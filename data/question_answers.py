"""Training on questions with options: sequences with a loss on the letter of the answer alone."""

from data.cache import group, tokenize_once
from data.files import read_rows
from data.questions import solved_files
from data.trees import OptionEncoder, question_tree
from runtime import rooms


def load_answers(name, tokenizer, *, max_length, add_bos, revision=None, **options):
    """Return Sequences of a task's solved questions, with a loss on the letter of the answer only.

    name: as in --tasks; 'p_ik:folder' are the questions of written/p_ik.py. The tokens are those of
    an evaluation with prompt_format 'mmlu' and 0 shots. options: of `tokenize_once`
    """
    task = name.partition(':')[0]
    encoder = OptionEncoder(tokenizer, add_bos, 'none')
    if task == 'p_ik':
        p_ik = rooms.load(task)
        files, to_questions = [p_ik.sample_file(name)], p_ik.drawn_questions

        def read(files, _):
            return p_ik.latest_answers(read_rows(*files))   # samples are all of the split test
    else:
        files, to_questions, read = solved_files(name, revision)

    def encode(row, place):
        sequences = []
        for question in to_questions(row, place):
            tree, k = question_tree(question, [], encoder, max_length), question.answer
            ids = tree.sequences[k]
            start = tree.starts[k]
            sequences.append((group(ids[:start]), ids, [int(i >= start) for i in range(len(ids))]))
        return sequences

    settings = {'task': task, 'max_length': max_length, 'add_bos': add_bos}
    return tokenize_once(files, encode, tokenizer, settings, read=read, **options)

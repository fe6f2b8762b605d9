"""The worlds of the study: several languages, paraphrases, and questions in text or by letter.

Languages but English have generated words. The world of world.py is a small one of these.
"""

import itertools
import re
from dataclasses import dataclass

import numpy as np

from data.prompts import LETTERS, listed
from world import (ATTRIBUTES, ENGLISH, Language, World, WorldSpec, choice, conversation,
                        log_uniform_facts, question, solved_list, write_world)


@dataclass(frozen=True)
class StudySpec(WorldSpec):
    """The size and content of a world; together with the seed it decides every byte."""
    unseen: int = 0                 # further entities that no text mentions
    exam_share: float = 0.0         # share of documents that are lists with options and letters
    paraphrases: bool = False       # several wordings, single statements, five kinds of instruction
    language_shares: tuple[float, ...] = (1.0,)     # of the documents: English, generated ones
    unseen_questions: int = 0       # about entities that no text mentions
    validation: int = 0             # questions in English about further facts
    forms: tuple[str, ...] = ()     # further FORMS of the questions, each in its own folder
    probes: int = 0                 # held-out documents for clm, and as many profiles for facts


# form of a question -> (whether its options are texts, or letters of texts that the question
# lists; the number of options)
FORMS = {'text4': ('text', 4), 'text10': ('text', 10),
         'letters4': ('letters', 4), 'letters10': ('letters', 10)}


class StudyWorld(World):
    """A World in several languages, with more kinds of documents."""

    def __init__(self, spec, seed):
        rng = np.random.default_rng(seed)
        super().__init__(spec, spec.entities + spec.unseen, rng)    # the unseen ones come last
        taken = {word for words in ENGLISH.values.values() for word in words}
        self.languages = [ENGLISH] + [_make_language(f'l{i}', rng, taken)
                                      for i in range(1, len(spec.language_shares))]

    def statement(self, entity, attribute, rng, language=ENGLISH):
        return choice(language.statements[attribute], rng).format(
            name=self.names[entity], value=self.value(entity, attribute, language))

    def sentence(self, entity, rng, language):
        """Return a profile; with paraphrases, a single fact in half of the cases."""
        if self.spec.paraphrases and rng.random() < 0.5:
            return self.statement(entity, choice(ATTRIBUTES, rng), rng, language)
        return self.profile(entity, rng, language)

    def ask(self, entity, attribute, language=ENGLISH, rng=None):
        """Return a question, in a random wording if `rng` and paraphrases are on."""
        template = choice(language.asks, rng) if rng and self.spec.paraphrases else language.asks[0]
        return template.format(name=self.names[entity], attribute=language.attributes[attribute])

    def exam(self, entity, attribute, n_options, rng, language=ENGLISH):
        """Return (question with lettered options, letter of the answer)."""
        values, answer = self.options(entity, attribute, n_options, rng)
        return (self.ask(entity, attribute, language, rng)
                + listed(language.values[attribute][v] for v in values), LETTERS[answer])

    def document(self, rng, entities):
        """Return sentences about `entities`, or a list of solved questions about one attribute."""
        spec, shares = self.spec, self.spec.language_shares
        language = ENGLISH if len(shares) == 1 else self.languages[
            int(np.searchsorted(np.cumsum(shares), rng.random() * sum(shares)))]
        kind = rng.random()
        if kind >= spec.list_share + spec.exam_share:
            return ' '.join(self.sentence(entity, rng, language) for entity in entities)
        attribute = choice(ATTRIBUTES, rng)
        if kind < spec.list_share:
            return solved_list(attribute, [(self.ask(e, attribute, language, rng),
                                            self.value(e, attribute, language)) for e in entities])
        n_options = 4 if rng.random() < 0.5 else 10
        return solved_list(attribute, [self.exam(e, attribute, n_options, rng, language)
                                       for e in entities[:len(entities) // 2]])    # they are long


def make_world(folder, seed, spec):
    """Write the files of `write_world`; `_make_rows` says which."""
    write_world(folder, seed, spec, _make_rows)


def _make_rows(spec, seed):
    """Return {path: rows} of text.jsonl, instruct.jsonl and questions.jsonl. spec.forms adds
    folders with test.jsonl (all languages, 'seen' or 'unseen') and validation.jsonl, .probes
    clm.jsonl and facts.jsonl, .paraphrases instruct-homogeneous.jsonl, all in one wording."""
    world, rng = StudyWorld(spec, seed), np.random.default_rng([seed, 1])
    files = {'text.jsonl': [{'text': text} for text in world.documents(spec.documents, rng)]}
    facts = log_uniform_facts(spec, spec.instructions + spec.questions + spec.validation, rng)
    instructed, rest = facts[:spec.instructions], facts[spec.instructions:]
    test, held_out = rest[:spec.questions], rest[spec.questions:]
    files['questions.jsonl'] = [question(world, f, world.options(*f, 4, rng)) for f in test]
    files['instruct.jsonl'] = [_instruction(world, *fact) for fact in instructed]
    if spec.paraphrases:
        rng = np.random.default_rng([seed, 2])
        files['instruct-homogeneous.jsonl'] = files['instruct.jsonl']
        files['instruct.jsonl'] = [_instruction(world, *fact, rng) for fact in instructed]
    rng = np.random.default_rng([seed, 3])
    unseen = [(spec.entities + int(rng.integers(spec.unseen)), choice(ATTRIBUTES, rng))
              for _ in range(spec.unseen_questions)]
    for form in spec.forms:
        kind, n_options = FORMS[form]
        drawn = [(fact, world.options(*fact, n_options, rng), kind, category)
                 for category, facts in (('seen', test), ('unseen', unseen), ('', held_out))
                 for fact in facts]
        n = len(test) + len(unseen)
        files[f'{form}/test.jsonl'] = [_question(world, *each, language)
                                       for language in world.languages for each in drawn[:n]]
        files[f'{form}/validation.jsonl'] = [_question(world, *each, ENGLISH)
                                             for each in drawn[n:]]
    if spec.probes:
        files['clm.jsonl'] = [{'text': text} for text in world.documents(spec.probes, rng)]
        entities = [entity for entity, _ in log_uniform_facts(spec, spec.probes, rng)]
        files['facts.jsonl'] = [_probe(world, language, entity, rng) for entity, language
                                in zip(entities, itertools.cycle(world.languages))]
    return files


def _make_language(code, rng, taken):
    """Return a language of generated words, none of which is in `taken`; add them to `taken`."""
    onsets = rng.permutation('b ch d f g h k kh l m n p r s sh t th v w y z'.split())[:9]
    vowels, codas = rng.permutation(list('aeiouy'))[:4], rng.permutation(list('nklmrstx'))[:3]

    def word(n_syllables=1):
        while True:
            new = ''.join(choice(onsets, rng) + choice(vowels, rng) for _ in range(n_syllables))
            new += choice(codas, rng) if rng.random() < 0.5 or len(new) < 3 else ''
            if new not in taken:
                taken.add(new)
                return new

    attributes = {a: word(2) for a in ATTRIBUTES}
    values = {a: [word(2).capitalize() if words[0].istitle() else word(2) for _ in words]
              for a, words in ENGLISH.values.items()}
    verbs, verb_last, link = {a: (word(), word()) for a in ATTRIBUTES}, rng.random() < 0.5, word()

    def clause(attribute, verb, slot):
        words = [verbs[attribute][verb], slot]
        return ' '.join(words[::-1] if verb_last else words)

    profiles = ['{name} ' + f' {link} '.join(clause(a, 0, f'{{{a}}}') for a in order) + '.'
                for order in (rng.permutation(ATTRIBUTES) for _ in range(3))]
    statements = {a: ['{name} ' + clause(a, verb, '{value}') + '.' for verb in (0, 1)]
                  for a in ATTRIBUTES}
    of, what = word(), [word() for _ in range(3)]
    asks = [f'{{name}} {of} {{attribute}} {w}?' if verb_last else
            f'{w.capitalize()} {{attribute}} {of} {{name}}?' for w in what]
    return Language(code, attributes, values, profiles, statements, asks)


def _instruction(world, entity, attribute, rng=None):
    """Return a conversation that asks for a fact in the wording of the questions.

    With `rng` the answer can also be a sentence, a profile or a letter, or come in a second turn.
    """
    ask = world.ask(entity, attribute, rng=rng)
    answer = f'Answer: {world.value(entity, attribute)}'
    kind = rng.integers(5) if rng else 0
    if kind == 0:
        return conversation(ask, answer)
    if kind == 1:
        return conversation(ask, world.statement(entity, attribute, rng))
    if kind == 3:
        exam, letter = world.exam(entity, attribute, int(choice((4, 10), rng)), rng)
        return conversation(exam, f'Answer: {letter}')
    tell = f'Tell me about {world.names[entity]}.', world.profile(entity, rng)
    return conversation(*tell) if kind == 2 else conversation(*tell, ask, answer)


def _question(world, fact, options, kind, category, language):
    """Return the row of a question in one of the FORMS."""
    row = question(world, fact, options, language)
    if kind == 'letters':
        choices = row['choices']
        row |= {'question': row['question'] + listed(choices),
                'choices': list(LETTERS[:len(choices)])}
    id = f'{language.code}-{row.pop("id")}'
    return row | {'subject_category': category, 'language': language.code, 'id': id}


def _probe(world, language, entity, rng):
    """Return a profile and the character spans of its values."""
    text = world.profile(entity, rng, language)
    values = [world.value(entity, attribute, language) for attribute in ATTRIBUTES]
    spans = [list(re.search(rf'(?<= ){value}\b', text).span()) for value in values]
    return {'text': text, 'spans': spans, 'language': language.code}

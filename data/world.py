"""Generated worlds: small universes of facts that a tiny model can partly learn, made from a seed.

A world has entities with a name and four attributes. Plain text states the facts about entity
number r with frequency proportional to r^-zipf: some thousands of times, some once, some never.
From the many entities that it hardly knows, the base model learns how uncertain to be. Instruction
data asks about known and unknown facts alike and requires a definite answer to each, which makes
real models overconfident too. The questions are about other facts.

`WorldSpec()` is the world of the demo. The study uses a larger one, in several languages with
generated words, with paraphrases, and with questions answered in text or by letter. The English
words are in world.json.
"""

import io
import itertools
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.files import writing
from data.prompts import HEADER, LETTERS, listed
from runtime.errors import DataError
from runtime.ownership import temporary

UNFINISHED = 'unfinished'       # the content of world.json while the other files are written
VALUE_EXPONENT = 0.7            # the entities' values have Zipf frequencies: some trades are common


@dataclass(frozen=True)
class WorldSpec:
    """The size and content of a world; together with the seed it decides every byte."""
    entities: int = 8_000           # mentioned in the text, with Zipf frequencies
    unseen: int = 0                 # further entities that no text mentions
    zipf: float = 0.9               # exponent of an entity's frequency in the text
    first_names: int = 150
    family_names: int = 150
    documents: int = 24_000         # texts, each about entities_each entities
    entities_each: int = 6
    list_share: float = 0.3         # share of documents that are lists of solved questions
    exam_share: float = 0.0         # share that are such lists with options and letters
    paraphrases: bool = False       # several wordings, single statements, five kinds of instruction
    language_shares: tuple[float, ...] = (1.0,)     # of the documents: English, generated ones
    vocab_sizes: tuple[int, ...] = (1_280,)         # one tokenizer each; several: in model-<size>/
    tokenizer_documents: int = 4_000                # the tokenizers are trained on these
    instructions: int = 2_000
    questions: int = 2_000          # about other facts than the instructions; log-uniform ranks
    unseen_questions: int = 0       # about entities that no text mentions
    validation: int = 0             # questions in English about further facts
    forms: tuple[str, ...] = ()     # further FORMS of the questions, each in its own folder
    probes: int = 0                 # held-out documents for clm, and as many profiles for facts


# form of a question -> (whether its options are texts, or letters of texts that the question
# lists; the number of options)
FORMS = {'text4': ('text', 4), 'text10': ('text', 10),
         'letters4': ('letters', 4), 'letters10': ('letters', 10)}


@dataclass(frozen=True)
class Language:
    """Words and templates. Names, the header of a list and 'Answer:' are the same in all."""
    code: str
    attributes: dict    # attribute -> its name in a question
    values: dict        # attribute -> its 24 values
    profiles: list      # templates of {name} and all attributes
    statements: dict    # attribute -> templates of {name} and {value}
    asks: list          # templates of {attribute} and {name}; the questions use the first one


ENGLISH = Language(**json.loads((Path(__file__).parent / 'world.json').read_text(encoding='utf-8')))
ENGLISH.values.update({a: words.split() for a, words in ENGLISH.values.items()})
ATTRIBUTES = list(ENGLISH.attributes)


class World:
    """Names and attribute values of all entities; entity 0 is the most frequent one."""

    def __init__(self, spec, seed):
        rng = np.random.default_rng(seed)
        n = spec.entities + spec.unseen     # the unseen ones come last
        self.spec, self.names = spec, _names(spec, n, rng)
        self.values = {}    # attribute -> int [n], the index of each entity's value
        for attribute, words in ENGLISH.values.items():
            share = np.arange(1, len(words) + 1) ** -VALUE_EXPONENT
            self.values[attribute] = rng.choice(len(words), n, p=share / share.sum())
        taken = {word for words in ENGLISH.values.values() for word in words}
        self.languages = [ENGLISH] + [_make_language(f'l{i}', rng, taken)
                                      for i in range(1, len(spec.language_shares))]

    def value(self, language, entity, attribute):
        return language.values[attribute][self.values[attribute][entity]]

    def profile(self, language, entity, rng):
        values = {a: self.value(language, entity, a) for a in ATTRIBUTES}
        return _draw(language.profiles, rng).format(name=self.names[entity], **values)

    def statement(self, language, entity, attribute, rng):
        return _draw(language.statements[attribute], rng).format(
            name=self.names[entity], value=self.value(language, entity, attribute))

    def sentence(self, language, entity, rng):
        """Return a profile; with paraphrases, a single fact in half of the cases."""
        if self.spec.paraphrases and rng.random() < 0.5:
            return self.statement(language, entity, _draw(ATTRIBUTES, rng), rng)
        return self.profile(language, entity, rng)

    def ask(self, language, entity, attribute, rng=None):
        """Return a question, in a random wording if `rng` and paraphrases are on."""
        template = _draw(language.asks, rng) if rng and self.spec.paraphrases else language.asks[0]
        return template.format(name=self.names[entity], attribute=language.attributes[attribute])

    def options(self, entity, attribute, n_options, rng):
        """Return (indices of values, position of the entity's own value among them)."""
        own = self.values[attribute][entity]
        others = [v for v in range(len(ENGLISH.values[attribute])) if v != own]
        values = [own, *rng.permutation(others)[:n_options - 1].tolist()]
        order = rng.permutation(n_options).tolist()
        return [values[i] for i in order], order.index(0)

    def exam(self, language, entity, attribute, n_options, rng):
        """Return (question with lettered options, letter of the answer)."""
        values, answer = self.options(entity, attribute, n_options, rng)
        return (self.ask(language, entity, attribute, rng)
                + listed(language.values[attribute][v] for v in values), LETTERS[answer])

    def document(self, rng, entities):
        """Return sentences about `entities`, or a list of solved questions about one attribute."""
        spec, shares = self.spec, self.spec.language_shares
        language = ENGLISH if len(shares) == 1 else self.languages[
            int(np.searchsorted(np.cumsum(shares), rng.random() * sum(shares)))]
        kind = rng.random()
        if kind >= spec.list_share + spec.exam_share:
            return ' '.join(self.sentence(language, entity, rng) for entity in entities)
        attribute = _draw(ATTRIBUTES, rng)
        if kind < spec.list_share:
            solved = [(self.ask(language, e, attribute, rng), self.value(language, e, attribute))
                      for e in entities]
        else:
            n_options = 4 if rng.random() < 0.5 else 10
            solved = [self.exam(language, e, attribute, n_options, rng)
                      for e in entities[:len(entities) // 2]]     # half as many: they are long
        solved = ''.join(f'{question}\nAnswer: {answer}\n\n' for question, answer in solved)
        return f'{HEADER.format(attribute)}\n\n{solved}'.rstrip()

    def documents(self, n, rng):
        spec = self.spec
        share = np.arange(1, spec.entities + 1) ** -spec.zipf
        entities = rng.choice(spec.entities, (n, spec.entities_each), p=share / share.sum())
        bar = tqdm(entities, 'generated world', unit=' documents', mininterval=1, disable=None)
        return [self.document(rng, row) for row in bar]


def make_world(folder, seed, spec=None):
    """Write model/{config.json, tokenizer.model}, text.jsonl, instruct.jsonl, questions.jsonl.

    spec.forms adds folders with test.jsonl (all languages, category 'seen' or 'unseen') and
    validation.jsonl; spec.probes adds clm.jsonl and facts.jsonl; spec.paraphrases adds
    instruct-homogeneous.jsonl, the same facts asked in one wording. A folder that already holds
    this world stays as it is. Raises ValueError for an impossible spec, DataError for a folder
    that holds anything but a world.
    """
    folder, spec = Path(os.path.expanduser(folder)), spec or WorldSpec()
    for form in spec.forms:
        if form not in FORMS:
            raise ValueError(f'form {form!r}; wanted one of {", ".join(FORMS)}')
    if spec.unseen_questions and not spec.unseen:
        raise ValueError(f'unseen_questions = {spec.unseen_questions} with unseen = 0: no entity '
                         f'is unseen')
    mark, complete = folder / 'world.json', json.dumps({'seed': seed} | asdict(spec), indent=1)
    before = mark.read_text(encoding='utf-8', errors='replace') if mark.is_file() else ''
    if before == complete:
        return
    # such a file is ours if it begins as we write it, or was being written
    if folder.exists() and any(folder.iterdir()) and not before.startswith(
            (UNFINISHED, complete[:complete.index(':')])):
        raise DataError(f'{folder} is not empty and holds no world; choose another folder')
    world = World(spec, seed)
    _write(mark, UNFINISHED)
    files = _rows(world, seed)
    for path, rows in files.items():
        _write(folder / path, ''.join(json.dumps(row) + '\n' for row in rows))
    texts = [row['text'] for row in files['text.jsonl'][:spec.tokenizer_documents]]
    for size in spec.vocab_sizes:
        model = folder / (f'model-{size}' if len(spec.vocab_sizes) > 1 else 'model')
        _write(model / 'tokenizer.model', _train_tokenizer(size, texts))
        _write(model / 'config.json', json.dumps(MODEL | {'vocab_size': size}, indent=1))
    _write(mark, complete)


def _rows(world, seed):
    """Return {path: rows} of all JSONL files."""
    spec, rng = world.spec, np.random.default_rng([seed, 1])
    files = {'text.jsonl': [{'text': text} for text in world.documents(spec.documents, rng)]}
    facts = _log_uniform_facts(spec, spec.instructions + spec.questions + spec.validation, rng)
    instructed, rest = facts[:spec.instructions], facts[spec.instructions:]
    test, held_out = rest[:spec.questions], rest[spec.questions:]
    files['questions.jsonl'] = [_question(world, f, world.options(*f, 4, rng)) for f in test]
    files['instruct.jsonl'] = [_instruction(world, *fact) for fact in instructed]
    if spec.paraphrases:
        rng = np.random.default_rng([seed, 2])
        files['instruct-homogeneous.jsonl'] = files['instruct.jsonl']
        files['instruct.jsonl'] = [_instruction(world, *fact, rng) for fact in instructed]
    rng = np.random.default_rng([seed, 3])
    unseen = [(spec.entities + int(rng.integers(spec.unseen)), _draw(ATTRIBUTES, rng))
              for _ in range(spec.unseen_questions)]
    for form in spec.forms:
        kind, n_options = FORMS[form]
        drawn = [(fact, world.options(*fact, n_options, rng), kind, category)
                 for category, facts in (('seen', test), ('unseen', unseen), ('', held_out))
                 for fact in facts]
        n = len(test) + len(unseen)
        files[f'{form}/test.jsonl'] = [_question(world, *question, language)
                                       for language in world.languages for question in drawn[:n]]
        files[f'{form}/validation.jsonl'] = [_question(world, *question, ENGLISH)
                                             for question in drawn[n:]]
    if spec.probes:
        files['clm.jsonl'] = [{'text': text} for text in world.documents(spec.probes, rng)]
        entities = [entity for entity, _ in _log_uniform_facts(spec, spec.probes, rng)]
        files['facts.jsonl'] = [_probe(world, language, entity, rng) for entity, language
                                in zip(entities, itertools.cycle(world.languages))]
    return files


MODEL = {
    'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'vocab_size': 1_280,
    'hidden_size': 128, 'intermediate_size': 352, 'num_hidden_layers': 2,
    'num_attention_heads': 4, 'num_key_value_heads': 4, 'max_position_embeddings': 512,
    'rms_norm_eps': 1e-5, 'rope_theta': 10000.0, 'tie_word_embeddings': True,
    'bos_token_id': 1, 'eos_token_id': 2, 'torch_dtype': 'float32',
}


def _names(spec, n, rng):
    """Return n distinct two-part names; parts have two syllables, or three if many are needed."""
    onset, vowel, coda = 'b d f g h j k l m n p r s t v w'.split(), 'aeiou', 'n r l s m'.split()
    syllables = [onset, vowel] * (1 if spec.first_names + spec.family_names <= 2560 else 2)
    parts = [''.join(word).capitalize() for word in itertools.product(*syllables, onset, 'ao')]
    picked = rng.permutation(parts)
    first, rest = picked[:spec.first_names], picked[spec.first_names:][:spec.family_names]
    # when the words run out, they are used again with another coda
    family = [rest[i % len(rest)] + coda[(i + i // len(rest)) % len(coda)]
              for i in range(min(spec.family_names, len(rest) * len(coda)))]
    if len(first) * len(family) < n:
        raise ValueError(f'{len(first)} first and {len(family)} family names make '
                         f'{len(first) * len(family)} names, not {n}')
    pairs = rng.permutation(len(first) * len(family))[:n]
    return [f'{first[i // len(family)]} {family[i % len(family)]}' for i in pairs]


def _make_language(code, rng, taken):
    """Return a language of generated words, none of which is in `taken`; add them to `taken`."""
    onsets = rng.permutation('b ch d f g h k kh l m n p r s sh t th v w y z'.split())[:9]
    vowels, codas = rng.permutation(list('aeiouy'))[:4], rng.permutation(list('nklmrstx'))[:3]

    def word(n_syllables=1):
        while True:
            new = ''.join(_draw(onsets, rng) + _draw(vowels, rng) for _ in range(n_syllables))
            new += _draw(codas, rng) if rng.random() < 0.5 or len(new) < 3 else ''
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


def _draw(items, rng):
    return items[int(rng.integers(len(items)))]


def _log_uniform_facts(spec, n, rng):
    """Return n distinct (entity, attribute) pairs, with log-uniform ranks of the entities."""
    facts = {}
    while len(facts) < n:
        rank = np.exp(rng.uniform(0, np.log(spec.entities + 1), size=n)).astype(int) - 1
        attributes = rng.choice(ATTRIBUTES, size=n)
        facts |= dict.fromkeys(zip(rank.clip(0, spec.entities - 1).tolist(), attributes.tolist()))
    chosen = list(facts)
    return [chosen[i] for i in rng.permutation(len(chosen))[:n]]


def _instruction(world, entity, attribute, rng=None):
    """Return a conversation that asks for a fact in the wording of the questions.

    With `rng` the answer can also be a sentence, a profile or a letter, or come in a second turn.
    """
    ask = world.ask(ENGLISH, entity, attribute, rng)
    answer = f'Answer: {world.value(ENGLISH, entity, attribute)}'
    kind = rng.integers(5) if rng else 0
    if kind == 0:
        return _conversation(ask, answer)
    if kind == 1:
        return _conversation(ask, world.statement(ENGLISH, entity, attribute, rng))
    if kind == 3:
        question, letter = world.exam(ENGLISH, entity, attribute, int(_draw((4, 10), rng)), rng)
        return _conversation(question, f'Answer: {letter}')
    tell = f'Tell me about {world.names[entity]}.', world.profile(ENGLISH, entity, rng)
    return _conversation(*tell) if kind == 2 else _conversation(*tell, ask, answer)


def _conversation(*turns):
    return {'messages': [{'role': 'assistant' if i % 2 else 'user', 'content': turn}
                         for i, turn in enumerate(turns)]}


def _question(world, fact, options, kind='text', category='', language=None):
    """Return the row of a question; without `language` the row has no field for it."""
    (entity, attribute), (values, answer), words = fact, options, language or ENGLISH
    text, choices = world.ask(words, *fact), [words.values[attribute][v] for v in values]
    if kind == 'letters':
        text, choices = text + listed(choices), list(LETTERS[:len(choices)])
    question = {'question': text, 'choices': choices, 'answer': answer, 'subject': attribute}
    if not language:
        return question | {'id': f'{entity}-{attribute}'}
    return question | {'subject_category': category, 'language': language.code,
                       'id': f'{language.code}-{entity}-{attribute}'}


def _probe(world, language, entity, rng):
    """Return a profile and the character spans of its values."""
    text = world.profile(language, entity, rng)
    values = [world.value(language, entity, attribute) for attribute in ATTRIBUTES]
    spans = [list(re.search(rf'(?<= ){value}\b', text).span()) for value in values]
    return {'text': text, 'spans': spans, 'language': language.code}


def _train_tokenizer(vocab_size, texts):
    """Return a sentencepiece model with Gemma's settings: byte fallback, no normalization."""
    import sentencepiece
    model, texts = io.BytesIO(), [*texts, *['<|user|>\n<|assistant|>\n'] * 400]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split('\n') if line),
        model_writer=model, vocab_size=vocab_size, model_type='bpe', byte_fallback=True,
        normalization_rule_name='identity', remove_extra_whitespaces=False,
        add_dummy_prefix=False, split_digits=True, minloglevel=2)
    return model.getvalue()


def _write(path, content):
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary(path) as part:
            part.write_bytes(content if isinstance(content, bytes) else content.encode())

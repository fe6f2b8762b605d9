"""Grade a written answer: extract the final answer from a text, and compare it with references.

The final answer is extracted in two ways: `strict` accepts only the format of the prompt, `lenient`
also other ways to state an answer. A key maps answers that mean the same to the same text: samples
with one key agree, and an answer with the key of a reference is right.
"""

import functools
import re
import string
from fractions import Fraction

from data import code_tasks


# ---- Extraction: text -> the final answer, or None -----------------------------------------------

# a line with no other words, as a heading, or words before the answer in any emphasis
MARK = re.compile(r'^[#*_ \t]*(?:final )?answer[*_: \t]*$|####|<answer>'
                  r'|\banswer[*_ ]*(?:is\b|:)[ :*_]*', re.IGNORECASE | re.MULTILINE)
# between the thousands of a number: a comma or a space, as texts and LaTeX write them
SEPARATOR = (r'(?:(?:\\!){0,3}(?:,|\{(?:\\!)?,(?:\\!)?}|\\text\{,})(?:\\! ?){0,3}'
             r'|\{?\\[,:; ](?:\\!)?}?|[\u2009\u202f\xa0])')
NUMBER = re.compile(r'(?:(?<![\w.)\]])[-−])?\\?\$?(?<!\w)(?<!\d\.)(?:(?:'
                    rf'\d{{1,3}}(?:{SEPARATOR}\d{{3}})+(?!\d)|\d+)(?:\.\d+|/\d+)?|(?<!\.)\.\d+)')


def marked(text):
    """Return what follows the last '####', 'answer is', 'answer:' or <answer>; None if none."""
    marks = [*MARK.finditer(text)]
    return text[marks[-1].end():].partition('</answer>')[0] if marks else None


def last_boxed(text):
    """Return the content of the last \\boxed{...} with balanced braces; None if there is none."""
    opened, last, content = [], -1, ''
    for brace in re.finditer(r'(\\f?boxed\s*)?{|}', text):
        if brace[0] != '}':
            opened.append(brace.end() if brace[1] else -1)
        elif opened and (start := opened.pop()) > last:
            last, content = start, text[start:brace.start()]
    return content.strip() or None


def whole(text):
    """Return the text without trailing white space; a program needs its leading white space."""
    return text.rstrip() or None


def first_line(text):
    """Return the first line that is not blank."""
    return text.strip().partition('\n')[0].strip() or None


def short_answer(text):
    """Return the first sentence after the last mark, or of the first line, without markup.

    A period ends a sentence after three digits or letters other than A to Z: not in 'J. R. R.' or
    'St. Louis'.
    """
    line = first_line(marked(text) or text) or ''
    line = re.split(r'(?:(?<=[^\W_A-Z]{3})|(?<=[*"”`]))\.(?:\s|$)', line)[0]
    return line.strip(' *"“”`') if re.search(r'\w', line) else None


def gsm8k_number(text):
    """Return the first number after '#### ', the rule 'strict-match' of lm-evaluation-harness."""
    match = re.search(r'#### (-?[0-9.,]*[0-9][0-9.,]*)', text)
    return match and match[1]


def any_number(text):
    """Return the number after the last mark or in the last \\boxed{}, else the last of the text."""
    for part in (marked(text), last_boxed(text)):
        if part is not None and (match := NUMBER.search(part)):
            return match[0]
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


def any_formula(text):
    """Return the last \\boxed{}, else what is marked, else the last $formula$, else a number."""
    if boxed := last_boxed(text):
        return boxed
    if tail := first_line(marked(text) or ''):
        formula = re.search(r'\$(.+?)\$|\\\((.+?)\\\)', tail)
        return next(filter(None, formula.groups())) if formula else re.split(r'\.\s|\.$', tail)[0]
    formulas = re.findall(r'\$([^$]+)\$', text)
    return formulas[-1] if formulas else any_number(text)


# ---- Keys: answers that mean the same -> the same text -------------------------------------------

# the keys of the references are needed for each sample, and samples repeat each other
cached = functools.lru_cache(10_000)


def words(text, punctuation):
    """Return a text in lower case without articles; punctuation: a table of str.maketrans."""
    text = text.lower()
    key = ' '.join(re.sub(r'\b(a|an|the)\b', ' ', text.translate(punctuation)).split())
    return key or text.strip()


@cached
def triviaqa_text(text):
    """TriviaQA's own normalization: punctuation becomes a space, and articles are left out."""
    return words(text, dict.fromkeys(map(ord, string.punctuation + '‘’´`'), ' '))


@cached
def squad_text(text):
    """SQuAD's normalization, for NQ-open: punctuation is deleted, and articles are left out."""
    return words(text, dict.fromkeys(map(ord, string.punctuation)))


@cached
def number(text):
    """Return the value of a number, as a fraction in lowest terms; the text if it is none."""
    digits = re.sub(rf'{SEPARATOR}|\\?[\s,$%]', '', text).replace('−', '-').rstrip('.')
    try:
        # 10 ** exponent takes minutes to compute; in Python 4210_5 is 42105
        if re.search(r'[eE][-+]?\d{4}|_', digits):
            raise ValueError
        return str(Fraction(digits))
    except (ValueError, ZeroDivisionError):
        return text.strip().lower()


# the words that Lewkowycz et al. 2022 leave out, here with their singulars
UNITS = ('square|degrees?|units?|cm|km|meters?|inch(?:es)?|ft|foot|feet|gm|pounds?|mph|hours?|'
         'minutes?|dollars?|cents?|points?|ways?|integers?|digits?|meals?|edges?|students?|'
         'multiples?')
# in this order; after Lewkowycz et al. 2022 and the code of Hendrycks et al. 2021 for MATH, where a
# last \text that begins with a space is a unit. There must be something before a unit.
LATEX = [(re.compile(pattern), new) for pattern, new in (
    (r'\\left|\\right|\\displaystyle|(?<!\\)\\[!,;: ]|\\\(|\\\)|\\\[|\\\]|\\?\$|~', ''),
    (r'(?<=[\w)}])\s*\\(?:text|mbox|mathrm){(?: [^{}]*|m)}(?:\^{?[23]}?)?(?=[\s.]*$)', ''),
    (r'\\text(?:bf|it|rm)?{([^{}]*)}|\\math(?:rm|bf){([^{}]*)}|\\mbox{([^{}]*)}', r'\1\2\3'),
    (r'\^{?\\circ}?|\\degrees?', ''),
    (rf'(?<=[\w)}}])(?:\s*(?<![a-zA-Z])(?:{UNITS})(?![a-zA-Z])(?:\^{{?[23]}}?)?)+', ''),
    (r'\\?%', ''), (r'\{,}|(?<=\d)\{}(?=\d{3})', ','), (r'\\[dtc]frac', r'\\frac'), (r'\s', ''),
    (r'\\frac([^{}\\])([^{}\\])', r'\\frac{\1}{\2}'), (r'\\frac([^{}\\])(?={)', r'\\frac{\1}'),
    (r'\\frac({(?:[^{}]|{[^{}]*})*})([^{}\\])', r'\\frac\1{\2}'),
    (r'\\sqrt([^{}\\[])', r'\\sqrt{\1}'), (r'([_^]){([^{}])}', r'\1\2'),
    (r'^-?\d{1,3}(?:,\d{3})+(?:\.\d+)?$', lambda match: match[0].replace(',', '')),
    (r'^(-?)\\frac{(-?\d+)}{(\d+)}$', r'\1\2/\3'), (r'^[a-zA-Z]\w?=', ''), (r'\.$', ''))]


@cached
def formula(text):
    """Return LaTeX in a canonical form, a number by its value. Nothing is computed."""
    for pattern, new in LATEX:
        text = pattern.sub(new, text)
    return text if ',' in text else number(text)       # a comma left separates two numbers


# ---- Match rules: (key, lenient answer, references) -> right or wrong ----------------------------

def same(key, answer, references):
    """Return whether an extracted answer has the key of a reference."""
    return key(answer) in map(key, references)


def contains(key, answer, references):
    """Return whether the words of a reference stand in an extracted answer, by their keys."""
    return any(f' {key(reference)} ' in f' {key(answer)} ' for reference in references)


def passes(key, answer, references, isolation='namespaces'):
    """Return whether a written program passes the tests of its Problem. Runs the program."""
    return code_tasks.check(code_tasks.Problem(*references), answer, isolation=isolation)[0]

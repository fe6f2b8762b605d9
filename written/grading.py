"""Grade a written answer: extract the final answer from a text, and compare it with references.

`strict` extraction accepts only the format of the prompt, `lenient` also other ways to state an
answer. A key maps answers that mean the same to the same text: samples with one key agree, and an
answer with the key of a reference is right.
"""

import functools
import re
import string
import unicodedata

from written import code_tasks
from written.numbers import last_number, plain, read_number, result


# ---- Extraction: text -> the final answer, or None -----------------------------------------------

# a line with no other words, as a heading, or words before the answer in any emphasis
MARK = re.compile(r'^[#*_ \t]*(?:final )?answer[*_:： \t]*$|####|<answer>'
                  r'|\banswer[*_ ]*(?:is\b|[:：])[ :：*_]*', re.IGNORECASE | re.MULTILINE)
# a stated confidence: its tag, up to an answer if it is not closed; its line; its label and number
LABEL = (r'(?:(?:my|overall|stated) )?confidence(?: (?:level|score|rating)| in (?:my|this|the) '
         r'answer)?[*_"` ]{0,9}')
CONFIDENCE = re.compile(
    r'<confidence>(?:(?!</confidence>|<answer>)[\s\S])*+(?:</confidence>)?'
    rf'|^[#*_> \t-]{{0,9}}{LABEL}[:=：](?:(?!answer|####|<|\\boxed).)*+'
    rf'|[(\[]?\b{LABEL}(?:[:=：]|is\b)[*_"`: ]{{0,9}}[-+]?[\d.,٫]++'
    r'(?:\s?(?:[%％٪]|percent\b|(?:/|out of) ?\d++))?[)\]*_.]*+', re.IGNORECASE | re.MULTILINE)
# a period after them ends no sentence; nor does one after two letters, as in 'St.'
ABBREVIATIONS = frozenset(
    'Adm Apr Aug Ave Blvd Bros Brig Capt Cmdr Col Corp Cpl Dec Dept Feb Gen Gov Hon Inc Jan Lieut '
    'Ltd Maj Messrs Mme Mmes Mrs Msgr Nov Oct Pres Prof Pvt Rep Rev Sen Sep Sept Sgt Supt Univ '
    'Vol approx vol'.split())


def without_confidence(text):
    """Return a text with a line break in place of each stated confidence, which is no answer."""
    return CONFIDENCE.sub('\n', text)


def marked(text):
    """Return what follows the last '####', 'answer is', 'answer:' or <answer>; None if none."""
    marks = [*MARK.finditer(text)]
    return text[marks[-1].end():].partition('</answer>')[0] if marks else None


def last_boxed(text):
    """Return the content of the last \\boxed{...} with balanced braces; None if there is none."""
    opened, boxes = [], {-1: ''}        # {where a box begins: its content}
    for brace in re.finditer(r'(\\f?boxed\s{0,9})?{|}', text):
        if brace[0] != '}':
            opened.append(brace.end() if brace[1] else -1)
        elif opened and (start := opened.pop()) >= 0:
            boxes[start] = text[start:brace.start()]
    return boxes[max(boxes)].strip() or None


def whole(text):
    """Return the text without trailing white space; a program needs its leading white space."""
    return text.rstrip() or None


def first_line(text):
    """Return the first line that is not blank."""
    return text.strip().partition('\n')[0].strip() or None


def short_answer(text):
    """Return the first sentence after the last mark, or of the first line, without markup.

    A period ends it after three digits or small letters that are no abbreviation, as 'Sept. 11'.
    """
    line = first_line(marked(text) or text) or ''
    for end in re.finditer(r'(?:(?<=[^\W_A-Z]{3})|(?<=[*"”`]))\.(?:\s|$)|[。।]', line):
        if re.search(r'\w*$', line[max(0, end.start() - 9):end.start()])[0] not in ABBREVIATIONS:
            line = line[:end.start()]
            break
    return line.strip(' *"“”`') if re.search(r'\w', line) else None


def only_line(text):
    """Return the first line, None if the answer is marked elsewhere."""
    return first_line(text) if marked(text) is None else None


def only_number(text):
    """Return the first line if it is a number alone and no other answer is marked."""
    line = only_line(text)
    return line if line and read_number(line) is not None else None


def gsm8k_number(text):
    """Return the first number after '#### ', the rule 'strict-match' of lm-evaluation-harness.

    Its regular expression also takes a part of a number or of '2*30=60'; here that is no answer.
    """
    if match := re.search(r'#### (?=-?[0-9.,]*[0-9])', text):
        number = result(text := text[match.end():])
        if number and number.start == 0 and number.value is not None:
            return text[:number.end]
    return None


def any_number(text):
    """Return what `gsm8k_number` does, else the number, or the result of the calculation, after the
    last mark or in the last \\boxed{}, None if it cannot be read; else the last of the text.
    """
    if answer := gsm8k_number(text):
        return answer
    number = last_number(text)
    for part in (last_boxed(text), marked(text)):
        if part and (of_part := result(part)):
            text, number = part, of_part
    return None if number is None or number.value is None else text[number.start:number.end]


def short_number(text):
    return only_number(text) or any_number(text)


def any_formula(text):
    """Return the last \\boxed{}, else what is marked, else the last $formula$, else a number."""
    if boxed := last_boxed(text):
        return boxed
    if tail := (first_line(marked(text) or '') or '').lstrip('*_` '):
        formula = re.search(r'\$([^$]+)\$|\\\(((?:(?!\\[()]).)+)\\\)', tail)
        if formula:
            return formula[1] or formula[2]
        tail = re.split(r'\.\s|\.$', tail)[0]
        return tail if tail.endswith('^*') else tail.rstrip('*_` ')
    formulas = re.findall(r'\$([^$]+)\$', text)
    return formulas[-1] if formulas else any_number(text)


# ---- Keys: answers that mean the same -> the same text -------------------------------------------

# the keys of the references are needed for each sample, and samples repeat each other
cached = functools.lru_cache(10_000)


def words(text, space):
    """Return a text in lower case, `space` in place of each punctuation mark, without articles.

    Articles stay if nothing else does: 'A' is the answer of many questions with options.
    """
    text = unicodedata.normalize('NFKC', text.replace('´', "'")).lower()
    text = ''.join(space if char in string.punctuation or unicodedata.category(char)[0] == 'P'
                   else char for char in unicodedata.normalize('NFC', text))
    return ' '.join(re.sub(r'\b(a|an|the)\b', ' ', text).split()) or ' '.join(text.split())


@cached
def triviaqa_text(text):
    """TriviaQA's own normalization: punctuation becomes a space, and articles are left out."""
    return words(text, ' ') or text.strip()


@cached
def squad_text(text):
    """SQuAD's normalization, for NQ-open: punctuation is deleted, and articles are left out."""
    return words(text, '') or text.strip()


@cached
def number(text):
    """Return the value of a number, as a fraction in lowest terms; the text if it is none."""
    value = read_number(text)
    return text.strip().lower() if value is None else str(value)


# that Lewkowycz et al. 2022 leave out, here with their singulars
UNITS = ('square|degrees?|units?|cm|km|meters?|inch(?:es)?|ft|foot|feet|gm|pounds?|mph|hours?|'
         'minutes?|dollars?|cents?|points?|ways?|integers?|digits?|meals?|edges?|students?|'
         'multiples?')
# in this order; after Lewkowycz et al. 2022 and the code of Hendrycks et al. 2021 for MATH
LATEX = [(re.compile(pattern), new) for pattern, new in (
    (r'\\\\\[[^\[\]]{0,9}\]', r'\\\\'), ('–', '-'), ('∞', r'\\infty'),
    ('π', r'\\pi'),
    (r'\\left|\\right|\\displaystyle|(?<!\\)\\[!,;: ]|\\\(|\\\)|\\\[|\\\]|\\?\$|~', ''),
    (r'(?<=[\w)}])\s*\\(?:text|mbox|mathrm){(?: [^{}]*|m)}(?:\^{?[23]}?)?(?=[\s.]*$)', ''),
    (r'(?:{})?\^\s?(?:{\s?)?(?:\\circ|\\(?:text|mathrm){o})(?:\s?})?|°|\\degrees?', ''),
    (r'\\text(?:bf|it|rm)?{([^{}]*)}|\\math(?:rm|bf){([^{}]*)}|\\mbox{([^{}]*)}', r'\1\2\3'),
    (rf'(?<=[\w)}}])(?:\s*(?<![a-zA-Z])(?:{UNITS})(?![a-zA-Z])(?:\^{{?[23]}}?)?)+', ''),
    (r'\\?%', ''), (r'\{,}|(?<=\d)\{}(?=\d{3})', ','), (r'\\[dtc]frac', r'\\frac'), (r'\s', ''),
    (r'\\frac([^{}\\])([^{}\\])', r'\\frac{\1}{\2}'), (r'\\frac([^{}\\])(?={)', r'\\frac{\1}'),
    (r'\\frac({(?:[^{}]|{[^{}]*})*})([^{}\\])', r'\\frac\1{\2}'),
    (r'\\sqrt([^{}\\[])', r'\\sqrt{\1}'), (r'([_^]){([^{}])}', r'\1\2'),
    (r'^-?\d{1,3}(?:,\d{3})+(?:\.\d+)?$', lambda match: match[0].replace(',', '')),
    # the brackets of a matrix of numbers, and its last line break
    (r'[(\[]?\\begin{(?:[bp]?matrix|smallmatrix|array)}(?:{[lcr|]*})?', r'\\begin{matrix}'),
    (r'(?:\\\\)?\\end{(?:[bp]?matrix|smallmatrix|array)}[)\]]?', r'\\end{matrix}'),
    (r'^(?:m?\\angle\w{1,3}|[a-zA-Z]\w?)(?:=|\\in(?![a-z]))', ''), (r'\+(?=\\infty)', ''),
    (r'\.$', ''))]
BETWEEN = re.compile(r'([,;&=()\[\]|]|\\\\|\\[{}]|\\(?:cup|cap|in|setminus)(?![a-zA-Z])'
                     r'|\\(?:begin|end){\w+})')     # the numbers of a tuple, an interval, a matrix


# a pi / b, (a / b) pi or a pi
PI = re.compile(r'(-?)(?:\\frac{([^{}\\]{0,40})\\pi}{([^{}]{1,40})}'
                r'|((?:\\frac{[^{}]{1,40}}{[^{}]{1,40}})?|[\d./]{1,40})\\pi(?:/(\d{1,40}))?)')


def canonical(part):
    """Return a number by its value, also as a multiple of pi, and other LaTeX in lower case."""
    if multiple := PI.fullmatch(part):
        sign, a, b, c, d = multiple.groups()
        values = read_number(a or c or '1'), read_number(b or d or '1')
        if values[0] is not None and values[1]:
            return f'{sign}{values[0] / values[1]}pi'
    # a letter is a variable, unless it belongs to the name of a command
    variable = re.search(r'(?<![\\a-zA-Z])[a-zA-Z]', part)
    return part.lower() if variable else number(part)


@cached
def formula(text):
    """Return LaTeX in a canonical form, each number in it by its value. Nothing is computed."""
    text = plain(text)
    for pattern, new in LATEX:
        text = pattern.sub(new, text)
    # a comma left separates two numbers
    parts = BETWEEN.split(text) if ',' in text or read_number(text) is None else [text]
    return ''.join(map(canonical, parts))


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

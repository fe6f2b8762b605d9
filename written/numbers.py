"""Read numbers in texts: the one reader of graders, confidences, rewards and prediction files.

A part of a number is never read: 1.2.3 has no value, and x2 is a name. What has several readings is
decided by the rules of docs/written_answers.md#numbers. Expressions have possessive or bounded
repetitions, since a model may write anything.
"""

import contextlib
import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple


class Number(NamedTuple):
    """A number in a text, text[start:end]; sign, currency before it and percent belong to it."""
    start: int
    end: int
    value: Fraction | None      # None: it cannot be read, as 1.2.3
    per: int = 1                # 100 with a percent sign: value is 80 in '80 %'


# ---- Characters: a text of the same length in ASCII digits and signs -----------------------------

MARKS = {'٫': '.', '٬': '’', '٪': '%', '−': '-', '⁄': '/', '∕': '/', '，': '，'}


class _Plain(dict):
    """A table of str.translate that is filled as characters are met."""

    def __missing__(self, code):
        char = chr(code)
        new = MARKS.get(char, char)
        if (digit := unicodedata.decimal(char, None)) is not None:
            new = str(digit)
        elif unicodedata.category(char) == 'Cf':        # from right to left
            new = ' '
        elif char not in MARKS and ('\ufe50' <= char <= '\ufe6b' or '\uff01' <= char <= '\uffee'):
            new = unicodedata.normalize('NFKC', char)       # of another width
        return self.setdefault(code, new if len(new) == 1 else char)


PLAIN = _Plain()


def plain(text):
    """Return a text of the same length, with digits, signs and separators as in ASCII."""
    # a wide comma separates clauses, unless the digits are wide as well
    return re.sub('(?<=[０-９])，(?=[０-９])', ',', text).translate(PLAIN)


# ---- The grammar, of plain texts -----------------------------------------------------------------

# scripts with capitals: after their letters a number is a part of a name, as in x2 or H2O
CASED = 'A-Za-zªºÀ-ÖØ-öø-ɏͰ-ԯԱ-ևḀ-῾'
SPACE = r'[^\S\n]'
# between the thousands of a number: commas and spaces of LaTeX, narrow or no-break spaces, a space
GROUP = (r'(?:(?:\\!){1,3},(?:\\! ?){0,3}|,(?:\\! ?){1,3}|\{?\\[,:; ](?:\\!)?\}?'
         r'|(?:\\!){0,3}(?:\{(?:\\!)?,(?:\\!)?\}|\\text\{,\})(?:\\! ?){0,3}'
         r'|[\u2007\u2009\u202f\xa0]| (?=[0-9]{3}(?![0-9A-Za-z/-])))(?=[0-9]{3}(?![0-9]))')
DIGITS = (rf"(?:[0-9]++(?:(?<![0-9]{{4}}){GROUP}[0-9]++)*+(?:[.,'’][0-9]++)*+"
          rf"|(?<![{CASED}\d_.)\]])\.[0-9]++(?:[.,'’][0-9]++)*+)")
SUPERSCRIPTS = str.maketrans('⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹', '-+0123456789')
POWER = r'(?:(?:\^|\*\*)\s?\{?\s?-?[0-9]++\s?\}?|[⁻⁺⁰¹²³⁴-⁹]{1,9})'
VULGAR = '[¼-¾⅐-⅞↉]'
BRACED = rf'(?:\{{\s?-?{DIGITS}\s?\}}|[0-9])'
FRAC = rf'\\[dtc]?frac\s?{BRACED}\s?{BRACED}'
# powers of ten of English, Chinese, Japanese and Korean; M, B and bn after a currency alone
UNIT = '[百千万萬億亿兆천만억]'
SCALES = {'hundred': 2, 'thousand': 3, 'million': 6, 'billion': 9, 'trillion': 12, 'lakh': 5,
          'crore': 7, 'k': 3, 'm': 6, 'b': 9, 'bn': 9, '百': 2, '千': 3, '万': 4, '萬': 4, '億': 8,
          '亿': 8, '兆': 12, '천': 3, '만': 4, '억': 8}
PERCENT = (r'(?=[\\%‰割成パ퍼PpпП])(?:\\?%|‰|[割成](?!\w)|パーセント|퍼센트|(?i:per ?cent|pct'
           r'|pro[zc]ent|por ?cien(?:to)?|por cento|pour ?cent|процент)(?![^\W\d_]))')
NUMBER = re.compile(
    # (?=) let the search pass over other characters quickly
    rf'(?=[0-9.%$€£¥₹₩₽+–\\¼-¾⅐-⅞↉百千-])(?P<prefix>百分之|千分之|%)?'
    rf'(?P<sign>(?<![{CASED}0-9_א-ת.)\]}}%°+–-])[-+–]|(?:\A|(?<=[={{(])|(?<=[={{(] ))-{SPACE})?'
    rf'(?:(?P<cash>\\?\$|[€£¥₹₩₽])(?P<sign2>[-+–])?)?'
    rf'(?:(?P<whole>{DIGITS})(?:{SPACE}?(?:(?:\\,)?(?P<part>{VULGAR}|{FRAC})'
    rf'|(?=[0-9])(?<=\s)(?P<mixed>[0-9]++/[0-9]++)|/{SPACE}?(?P<below>{DIGITS})'
    rf'|(?P<times>(?<!\s)[eE][-+]?[0-9]++|(?:[×xX*·⋅]|\\times|\\cdot){SPACE}?10{POWER}))'
    rf'|(?P<power>{POWER}))?|(?P<alone>{VULGAR}|{FRAC}))'
    # what makes it a part of a version, a date, a ratio, a power, a subscript, a root, a name
    rf'(?P<more>(?:[:/.][0-9]++|[{CASED}]++[0-9]\w*+|_\{{?\w|\^(?!\s?\{{?\\circ)|[√π]'
    rf'|\\(?:!|[√π]|sqrt|pi(?![A-Za-z])|[dtc]?frac))++)?'
    rf'(?:{SPACE}?(?=[htmblcHTMBLC])(?P<scale>'
    rf'(?i:hundred|thousand|million|billion|trillion|lakh|crore)s?\b)'
    rf'|(?P<unit>[kK]\b|(?(cash)(?:bn|[BM])\b|(?!))'
    rf'|{UNIT}(?![米克瓦分큼]))(?P<units>[0-9](?:[0-9.,]|{UNIT})*+)?)?'
    rf'(?P<percent>{SPACE}?{PERCENT})?')
# what may stand before a part of an expression
PART_BEFORE = re.compile(r'(?:[_^/√±∓]|[_^}]\{|\\(?:[dtc]?frac|sqrt|binom)\{|\\(?:pm|mp) ?)\Z')
# a number that follows is a part of the same calculation; units stand before a sign, not a dash
JOIN = re.compile(
    rf'(?:\((?=[-0-9.])|(?:(?:\\,|{SPACE})?\\(?:text|mbox|mathrm)\{{[^{{}}]{{0,40}}\}}'
    rf'|{SPACE}?(?!(?:as|because|for|if|since|so|when|where|with)\b)[^\W\d_]{{1,20}}+(?![^\W\d_])){{0,2}}'
    rf'(?:{SPACE}|[&)\]}}$]){{0,9}}?(?:(?P<equal>=>?|≈|→|⇒|->|\\(?:approx|to|[Rr]ightarrow)(?![A-Za-z])'
    rf'|(?i:\b(?:is equal to|equals)\b))|[*×·⋅÷/+]|(?<=\s):|\\(?:times|cdot|div|pm)(?![A-Za-z])'
    rf'|(?i:\b(?:x|times|plus|minus|multiplied by|divided by)\b))|{SPACE}{{0,3}}[-–—~〜～∼])'
    rf'(?:{SPACE}|[&(\[{{]){{0,9}}')


# one point is decimal, one comma with three digits after it is not; 0,123 has no thousands
FORMS = [(re.compile(form), thousands) for form, thousands in (
    (r'[0-9]{0,400}\.?[0-9]{1,400}', '’'),
    (r'(?!0)[0-9]{1,3}(?:,[0-9]{3}){1,99}(?:\.[0-9]{1,400})?', ','),
    (r'(?!0)[0-9]{1,2}(?:,[0-9]{2}){1,99},[0-9]{3}(?:\.[0-9]{1,400})?', ','),       # of India
    (r'(?!0)[0-9]{1,3}(?:(?:\.[0-9]{3}){1,99},[0-9]{1,400}|(?:\.[0-9]{3}){2,99})', '.'),
    (r'[0-9]{1,3}(?:’[0-9]{3}){1,99}(?:(?!,[0-9]{3}$)[.,][0-9]{1,400})?', '’'),
    (r'[0-9]{1,400},[0-9]{1,400}', '’'))]


def _decimal(digits):
    """Return the value of digits with separators; raises ValueError if they are no one number."""
    digits = re.sub(GROUP, '’', digits).replace("'", '’')
    for form, thousands in FORMS:
        if form.fullmatch(digits):
            return Fraction(digits.replace(thousands, '').replace(',', '.'))
    raise ValueError(digits)


def _fraction(text):
    """Return the value of '1/2', '½' or a fraction of LaTeX; raises ZeroDivisionError too."""
    parts = re.findall(f'-?{DIGITS}', unicodedata.normalize('NFKC', text).replace('⁄', '/'))
    above, below = parts if len(parts) == 2 else parts[0]       # \frac12
    return _decimal(above.lstrip('-')) / _decimal(below.lstrip('-')) * (
        -1 if (above + below).count('-') == 1 else 1)


def _power(text):
    """Return ten to the exponent in 'e5', '^{5}' or superscripts; a ValueError beyond 999."""
    exponent = re.search('[-+]?[0-9]{1,3}$', text.translate(SUPERSCRIPTS).rstrip(' }'))
    if not exponent or re.search('[0-9]{4}$', text):
        raise ValueError(text)
    return Fraction(10) ** int(exponent[0])


def _value(match):
    """Return the value of a match of NUMBER; raises ValueError if it cannot be read."""
    if match['more'] or match['units'] or match['below'] and match['percent']:
        raise ValueError(match[0])
    value = _fraction(match['alone']) if match['alone'] else _decimal(match['whole'])
    if part := match['part'] or match['mixed']:
        if value.denominator > 1 or match['mixed'] and _fraction(part) >= 1:
            raise ValueError(match[0])
        value += _fraction(part)
    elif match['below']:
        value /= _decimal(match['below'])
    elif match['times']:
        value *= _power(match['times'])
    elif match['power']:
        if value != 10:
            raise ValueError(match[0])
        value = _power(match['power'])
    if scale := match['scale'] or match['unit']:
        value *= 10 ** SCALES[scale.lower().removesuffix('s')]
    return -value if '-' in (signs := f"{match['sign']}{match['sign2']}") or '–' in signs else value


def _number(text, match):
    """Return the Number of a match of NUMBER in a plain text, None if it is a part of a name."""
    start, end = match.span()
    before = text[max(0, start - 9):start]
    if match['sign'] == '–' and re.search(r'[0-9%]\s*$', before):     # a range
        start += 1
    if not match['cash'] and re.search(f'[{CASED}]$', before) and not match['prefix']:
        return None
    percent = match['percent'] or match['prefix'] or ''
    per = 1000 if percent.endswith('‰') or match['prefix'] == '千分之' else (
        10 if percent.endswith(('割', '成')) else 100 if percent else 1)
    try:
        value = None if PART_BEFORE.search(before) else _value(match)
    except (ValueError, ZeroDivisionError):
        value = None
    return Number(start, end, value, per)


# ---- What is read --------------------------------------------------------------------------------

def first_number(text):
    """Return the first Number of a text, also one that cannot be read; None if there is none."""
    text = plain(text)
    return next(filter(None, (_number(text, match) for match in NUMBER.finditer(text))), None)


def last_number(text):
    """Return the last Number of a text that can be read, or None."""
    text = plain(text)
    numbers = (_number(text, match) for match in reversed([*NUMBER.finditer(text)]))
    return next((number for number in numbers if number and number.value is not None), None)


def result(text):
    """Return the first Number of a text, or the result of the calculation that begins with it.

    It is the number after the last '=', as 60 in '2 * 30 = 60'; it cannot be read if there is no
    '=', or if more than a number follows: nothing is computed. None: there is no number.
    """
    number = first_number(text)
    text = plain(text)
    terms = 1
    while number and (join := JOIN.match(text, number.end)) and (
            match := NUMBER.match(text, join.end())):
        terms = 1 if join['equal'] else terms + 1
        number = _number(text, match) or Number(*match.span(), None)
    return number and (number if terms == 1 else number._replace(value=None))


def read_number(text):
    """Return the value of a text that is a number or ends in its result, a Fraction; else None.

    A currency, a percent sign and a period after it are left out.
    """
    text = text.strip()
    first, number = first_number(text), result(text)
    alone = first and first.start == 0 and not text[number.end:].strip(' .$€£¥₩₹元円')
    return number.value if alone else None


# ---- Probabilities -------------------------------------------------------------------------------

# what names the scale, as in 'between 0 and 1', 'from 0% to 100%', '[0, 1]'; and an idiom
NO_ANSWER = re.compile(
    r'(?<![\w.,])(?:0(?:\.0{1,9})?\s{0,9}%?\s{0,9}(?:and|to|through|up to|[-–—,]|\.{2,3}'
    r'|[<≤]=?\s{0,9}\w{1,20}\s{0,9}[<≤]=?)\s{0,9}1(?:\.0{1,9}|00(?:\.0{1,9})?)?(?![\w/]|[.,]\d)'
    r'\s{0,9}%?|50 ?/ ?50\b)', re.IGNORECASE)
RANGE = re.compile(r'\s{0,9}(?:to\b|through\b|or\b|[-–—~〜∼至到±]|から|\.{2,3}|…|\+/-|\\pm)'
                   r'\s{0,9}[%$]?\.?[0-9]', re.IGNORECASE)
ODDS = re.compile(rf'(?<![0-9.,])({DIGITS})\s{{0,9}}:\s{{0,9}}({DIGITS})(?![:.,]?[0-9])')
OUT_OF = re.compile(r'\s{0,9}(?:out of|in|of)\s{0,9}(?:(?:every|each)\s{1,9})?(?=[0-9])',
                    re.IGNORECASE)


def parse_probability(text):
    """Return the first number of a text as a probability: '.8', '80%', '8 out of 10', odds '1:3'.

    None if there is none from 0 to 1, as in '80' or '-1', or if it is one end of a range, as in
    '0.7 to 0.9'; 'between 0 and 1' alone states no number.
    """
    text = NO_ANSWER.sub(' ', plain(text))
    if not (number := first_number(text)):
        return None
    value, before = number.value, text[max(0, number.start - 20):number.start]
    if odds := ODDS.match(text, number.start):
        value = None
        with contextlib.suppress(ValueError, ZeroDivisionError):
            for_it, against = map(_decimal, odds.groups())
            value = for_it / (for_it + against)
    elif RANGE.match(text, number.end) or re.search(r'(?i)\bbetween\W{0,9}$', before):
        return None
    elif number.per == 1 and (join := OUT_OF.match(text, number.end)):
        below = first_number(text[join.end():])
        value = value / below.value if value is not None and below.value else None
    value = None if value is None else value / number.per
    return None if value is None or not 0 <= value <= 1 else float(value)

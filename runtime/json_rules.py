"""Check the values of a JSON object against rules.

A rule lists the allowed values of a key, as alternatives: (lowest, highest) of integers or, if
these are floats, of any numbers; a type; [alternatives for the items of a list]; or a value.
"""

import json

from runtime.errors import CheckpointError


def check_values(values, rules, where, block='', required=()):
    """Raise CheckpointError for a missing or wrong value and, inside a block, an unknown key."""
    for key in rules | values:
        if block and key not in rules:
            problem = f'is not supported; the keys are {", ".join(rules)}'
        elif key in required and key not in values:
            problem = f'is missing; it must be {_describe(rules[key])}'
        elif key in rules and key in values and not _fits(values[key], rules[key]):
            problem = f'= {values[key]!r} is not supported; it must be {_describe(rules[key])}'
        else:
            continue
        raise CheckpointError(f'{where}: {block}{key} {problem}')


def _fits(value, rule):
    def fits(option):
        match option:
            case tuple((low, high)):
                return type(value) in (int, type(low)) and low <= value <= high
            case list():
                return type(value) is list and value != [] and all(_fits(x, option) for x in value)
        return option is type(value) or type(value) is type(option) and value == option
    return any(map(fits, rule))


def _describe(rule):
    names = {int: 'an integer', float: 'a number', str: 'a string', bool: 'true or false',
             dict: 'an object'}

    def text(option):
        match option:
            case tuple((low, high)):
                return f'{names[type(low)]} from {low} to {high}'
            case list():
                return f'a list, each item {_describe(option)}'
        return names.get(option) or json.dumps(option)
    return ' or '.join(map(text, rule))

"""The families of word problems, as one table: wording, how numbers are drawn, and the steps that solve it.

A step is three words, `left operator right`; an operand is the letter of a number (`a` is the first one drawn), a
literal, or `#1`, `#2`, ... for the result of an earlier step. In the wording, `{a}` to `{e}` are the numbers; `{name}`,
`{other}`, `{he}`, `{He}`, `{his}`, `{objects}`, `{things}` (other objects), `{containers}`, `{place}` and `{day}` come
from the scene.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

Draw = Callable[[Random], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of problem; every setup fits every question of the same family."""

    name: str
    draw: Draw
    steps: tuple[str, ...]
    setups: tuple[str, ...]
    questions: tuple[str, ...]


def _size(rng: Random, largest: int = 400) -> int:
    """2 to `largest`, small numbers more often: people ask about few things more often than about many."""
    return rng.randint(2, rng.choice((20, 100, largest)))


def _add(rng: Random) -> tuple[int, ...]:
    return _size(rng), _size(rng)


def _subtract(rng: Random) -> tuple[int, ...]:
    kept, taken = _size(rng), _size(rng)
    return kept + taken, taken


def _add_subtract(rng: Random) -> tuple[int, ...]:
    a, b = _size(rng), _size(rng)
    return a, b, rng.randint(2, a + b - 1)


def _product(rng: Random) -> tuple[int, ...]:
    return rng.randint(2, 12), rng.randint(2, 60)


def _product_add(rng: Random) -> tuple[int, ...]:
    return (*_product(rng), _size(rng, 300))


def _product_subtract(rng: Random) -> tuple[int, ...]:
    a, b = _product(rng)
    return a, b, rng.randint(2, a * b - 1)


def _change(rng: Random) -> tuple[int, ...]:
    count, price = rng.randint(2, 12), rng.randint(2, 40)
    return count, price, count * price + rng.randint(1, 100)


def _divide(rng: Random) -> tuple[int, ...]:
    divisor = rng.randint(2, 12)
    return divisor * rng.randint(2, 200 if divisor == 2 else 60), divisor


def _add_divide(rng: Random) -> tuple[int, ...]:
    total, divisor = _divide(rng)
    a = rng.randint(1, total - 1)
    return a, total - a, divisor


def _subtract_divide(rng: Random) -> tuple[int, ...]:
    total, divisor = _divide(rng)
    taken = _size(rng, 200)
    return total + taken, taken, divisor


def _times_as_many(rng: Random) -> tuple[int, ...]:
    return rng.randint(2, 60), rng.randint(2, 9)


def _ages(rng: Random) -> tuple[int, ...]:
    return rng.randint(3, 50), rng.randint(2, 30), rng.randint(2, 30)


def _savings(rng: Random) -> tuple[int, ...]:
    a, b = _product(rng)
    start = _size(rng, 300)
    return a, b, start, rng.randint(2, min(40, a * b + start - 1))


def _half(rng: Random) -> tuple[int, ...]:
    return (2 * rng.randint(2, 200),)


def _half_and_more(rng: Random) -> tuple[int, ...]:
    return 2 * rng.randint(2, 200), _size(rng, 200)


def _three(rng: Random) -> tuple[int, ...]:
    return _size(rng, 200), _size(rng, 200), _size(rng, 200)


def _two_products(rng: Random) -> tuple[int, ...]:
    return rng.randint(2, 12), rng.randint(2, 30), rng.randint(2, 12), rng.randint(2, 30)


def _two_products_change(rng: Random) -> tuple[int, ...]:
    a, b, c, d = _two_products(rng)
    return a, b, c, d, a * b + c * d + rng.randint(1, 100)


def _stock(rng: Random) -> tuple[int, ...]:
    divisor, each = rng.randint(2, 9), rng.randint(3, 40)
    a, b = _product(rng)
    given = rng.randint(1, a * b - 1)
    bought = divisor * each - (a * b - given)
    while not 2 <= bought <= 400:
        a, b = _product(rng)
        given, each = rng.randint(1, a * b - 1), rng.randint(3, 80)
        bought = divisor * each - (a * b - given)
    return a, b, given, bought, divisor


FAMILIES: Final = (
    Family(
        "gain",
        _add,
        ("a + b",),
        (
            "{name} has {a} {objects} and buys {b} more.",
            "{name} has {a} {objects} and finds {b} more.",
            "{name} had {a} {objects}. Then {he} bought {b} more.",
            "{name} has {a} {objects}. {other} gives {name} {b} more {objects}.",
            "On {day}, {name} picks {a} {objects}. Later {he} picks {b} more.",
            "{name} has {a} {objects} at home and {b} {objects} at the {place}.",
        ),
        (
            "How many {objects} does {name} have?",
            "How many {objects} does {name} have now?",
            "How many {objects} does {name} have altogether?",
            "How many {objects} does {he} have in total?",
        ),
    ),
    Family(
        "lose",
        _subtract,
        ("a - b",),
        (
            "{name} has {a} {objects} and gives {b} to {other}.",
            "{name} had {a} {objects} but lost {b} of them.",
            "{name} has {a} {objects}. {He} sells {b} {objects} at the {place}.",
            "{name} takes {a} {objects} to the {place} and leaves {b} there.",
            "Of the {a} {objects} that {name} has, {b} break on {day}, and {he} throws them away.",
        ),
        (
            "How many {objects} does {name} have left?",
            "How many {objects} does {name} have now?",
            "How many {objects} are left?",
        ),
    ),
    Family(
        "gain-lose",
        _add_subtract,
        ("a + b", "#1 - c"),
        (
            "{name} has {a} {objects} and buys {b} more. Then {he} gives {c} to {other}.",
            "{name} had {a} {objects}. {He} found {b} more at the {place}, but lost {c}.",
            "{name} picks {a} {objects} on {day} and {b} the next day. {He} sells {c} of them.",
        ),
        (
            "How many {objects} does {name} have left?",
            "How many {objects} does {name} have now?",
            "How many {objects} remain?",
        ),
    ),
    Family(
        "groups",
        _product,
        ("a * b",),
        (
            "{name} has {a} {containers} with {b} {objects} in each.",
            "There are {a} {containers} at the {place}. Each of them holds {b} {objects}.",
            "{name} fills {a} {containers}. {He} puts {b} {objects} into each.",
            "For {a} days, {name} collects {b} {objects} a day.",
        ),
        ("How many {objects} are there in all?", "How many {objects} are there?"),
    ),
    Family(
        "groups-and-loose",
        _product_add,
        ("a * b", "#1 + c"),
        (
            "{name} has {a} {containers} with {b} {objects} in each, and {c} loose {objects}.",
            "{name} packs {a} {containers} of {b} {objects}. {c} {objects} do not fit.",
        ),
        ("How many {objects} does {name} have in total?", "How many {objects} are there in all?"),
    ),
    Family(
        "groups-lose",
        _product_subtract,
        ("a * b", "#1 - c"),
        (
            "{name} buys {a} {containers} of {b} {objects} each. {He} gives {c} {objects} to {other}.",
            "At the {place} stand {a} rows of {b} {objects}. {name} takes {c} {objects} away.",
        ),
        ("How many {objects} are left?", "How many {objects} remain?"),
    ),
    Family(
        "price",
        _product,
        ("a * b",),
        (
            "{name} buys {a} {objects} for {b} dollars each.",
            "{name} buys {a} {objects} at the {place}. Each costs ${b}.",
            "{name} needs {a} {objects}, and one costs {b} dollars.",
        ),
        ("How many dollars does {he} pay?", "How much does {name} pay in dollars?", "What is the total cost?"),
    ),
    Family(
        "change",
        _change,
        ("a * b", "c - #1"),
        (
            "{name} buys {a} {objects} for {b} dollars each and pays with {c} dollars.",
            "{name} buys {a} {objects} that cost ${b} each. {He} gives the seller ${c}.",
        ),
        ("How many dollars does {he} get back?", "How much change does {name} get?"),
    ),
    Family(
        "share",
        _divide,
        ("a / b",),
        (
            "{name} shares {a} {objects} equally among {b} friends.",
            "{name} puts {a} {objects} into {b} {containers}, the same number in each.",
            "{b} children share {a} {objects} equally.",
        ),
        ("How many {objects} are in each share?", "How many {objects} is that for each?"),
    ),
    Family(
        "gain-share",
        _add_divide,
        ("a + b", "#1 / c"),
        (
            "{name} has {a} {objects} and {other} has {b}. They share all of them equally among {c} friends.",
            "{name} has {a} {objects} and buys {b} more. {He} divides them equally into {c} {containers}.",
        ),
        ("How many {objects} are in each share?", "How many {objects} is that for each?"),
    ),
    Family(
        "lose-share",
        _subtract_divide,
        ("a - b", "#1 / c"),
        (
            "{name} has {a} {objects}. {He} keeps {b} and shares the rest equally among {c} friends.",
            "Of {a} {objects}, {b} are broken. {name} packs the others into {c} {containers}, the same number in each.",
        ),
        ("How many {objects} are in each share?", "How many {objects} is that for each?"),
    ),
    Family(
        "more-than",
        _add,
        ("a + b",),
        (
            "{name} has {a} {objects}. {other} has {b} more {objects} than {name}.",
            "{other} has {b} more {objects} than {name}, and {name} has {a}.",
        ),
        ("How many {objects} does {other} have?",),
    ),
    Family(
        "together",
        _add,
        ("a + b", "a + #1"),
        (
            "{name} has {a} {objects}. {other} has {b} more {objects} than {name}.",
            "{other} has {b} more {objects} than {name}, and {name} has {a}.",
        ),
        ("How many {objects} do they have together?", "How many {objects} do {name} and {other} have in total?"),
    ),
    Family(
        "fewer-together",
        _subtract,
        ("a - b", "a + #1"),
        ("{name} has {a} {objects}. {other} has {b} fewer {objects} than {name}.",),
        ("How many {objects} do they have together?", "How many {objects} do {name} and {other} have in total?"),
    ),
    Family(
        "times-together",
        _times_as_many,
        ("a * b", "a + #1"),
        (
            "{name} has {a} {objects}. {other} has {b} times as many {objects} as {name}.",
            "{other} collected {b} times as many {objects} as {name}, who collected {a}.",
        ),
        ("How many {objects} do they have together?", "How many {objects} do {name} and {other} have in total?"),
    ),
    Family(
        "half",
        _half,
        ("a / 2",),
        (
            "{name} had {a} {objects} and sold half of them.",
            "There were {a} {objects} at the {place}. {name} took half of them home.",
        ),
        ("How many {objects} were left?", "How many {objects} does {name} have now?"),
    ),
    Family(
        "half-and-more",
        _half_and_more,
        ("a / 2", "#1 + b"),
        (
            "{name} had {a} {objects}. {He} gave half of them to {other} and then found {b} more.",
            "{name} sells half of {his} {a} {objects} on {day} and buys {b} {objects} the next day.",
        ),
        ("How many {objects} does {name} have now?", "How many {objects} does {he} have in the end?"),
    ),
    Family(
        "ages",
        _ages,
        ("a + b", "#1 + c"),
        (
            "{name} is {a} years old. {other} is {b} years older than {name}.",
            "{other} is {b} years older than {name}, who is {a}.",
        ),
        ("How old will {other} be in {c} years?",),
    ),
    Family(
        "pages",
        _product_subtract,
        ("a * b", "#1 - c"),
        (
            "{name} reads {b} pages a day for {a} days. Of these pages, {c} have pictures.",
            "For {a} days {name} reads {b} pages each day, and {c} of all the pages have pictures.",
        ),
        ("How many pages have no pictures?",),
    ),
    Family(
        "travel",
        _product_add,
        ("a * b", "#1 + c"),
        (
            "{name} rides {b} kilometers a day for {a} days, and then {c} kilometers on the last day.",
            "For {a} hours {name} drives {b} kilometers an hour. Then {he} drives {c} more kilometers to the {place}.",
        ),
        ("How many kilometers is that in total?", "How far does {he} go in kilometers?"),
    ),
    Family(
        "savings",
        _savings,
        ("a * b", "c + #1", "#2 - d"),
        (
            "{name} has {c} dollars. {He} saves {b} dollars a week for {a} weeks and spends {d} dollars.",
            "{name} earns ${b} a day for {a} days. {He} already had ${c}, and pays ${d} for a ticket.",
        ),
        ("How many dollars does {name} have now?", "How much money does {he} have in dollars?"),
    ),
    Family(
        "two-kinds",
        _two_products,
        ("a * b", "c * d", "#1 + #2"),
        (
            "{name} buys {a} {objects} for {b} dollars each and {c} {things} for {d} dollars each.",
            "At the {place}, {name} buys {a} {objects} at ${b} each and {c} {things} at ${d} each.",
        ),
        ("How many dollars does {he} pay?", "What is the total cost?"),
    ),
    Family(
        "two-kinds-change",
        _two_products_change,
        ("a * b", "c * d", "#1 + #2", "e - #3"),
        ("{name} buys {a} {objects} for {b} dollars each and {c} {things} for {d} dollars each. {He} pays with ${e}.",),
        ("How many dollars does {he} get back?", "How much change does {name} get?"),
    ),
    Family(
        "stock",
        _stock,
        ("a * b", "#1 - c", "#2 + d", "#3 / e"),
        (
            "{name} has {a} {containers} with {b} {objects} in each. {He} gives {c} {objects} away, buys {d} more and "
            "shares all of them equally among {e} friends.",
        ),
        ("How many {objects} are in each share?", "How many {objects} does each friend get?"),
    ),
    Family(
        "three-days",
        _three,
        ("a + b", "#1 + c"),
        (
            "{name} sells {a} {objects} on {day}, {b} the next day and {c} the day after.",
            "{name} has {a} {objects}, {other} has {b} and their friend has {c}.",
        ),
        ("How many {objects} is that in total?", "How many {objects} is that altogether?"),
    ),
)

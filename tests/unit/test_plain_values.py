"""Objects whose operators always agree fail; right code with operators of its own passes."""

from __future__ import annotations

import pytest

from mcore_rl.sandbox.code_tests import suite_of
from mcore_rl.sandbox.runner import run_python

PATIENT_SECONDS = 60.0
SAYS_YES = (
    "    def __eq__(s, o): return True\n"
    "    __le__ = __lt__ = __ge__ = __gt__ = __contains__ = __eq__\n"
    "    def __ne__(s, o): return False\n    def __hash__(s): return 0\n"
    "    def __sub__(s, o): return 0.0\n    __rsub__ = __add__ = __abs__ = __sub__\n"
    "    startswith = issuperset = __array_function__ = lambda *a, **k: True\n"
)


def forged(base: str, value: str = "", metaclass: str = "type") -> str:
    """Code whose function returns an object of a class that agrees to everything."""
    return (
        f"class E({base}, metaclass={metaclass}):\n{SAYS_YES}def f(*_): return E({value})\n"
        "def g(*_): return [f(), f()]\n"
    )


FORGERIES = {
    "an object": forged("object"),
    "an int": forged("int"),
    "a float": forged("float"),
    "a text": forged("str", "'a'"),
    "a list": forged("list", "[0]"),
    "a set": forged("set", "[0]"),
    "a dict": forged("dict"),
    "a date": "import datetime\n" + forged("datetime.date", "1, 1, 1"),
    "a Decimal": "import decimal\n" + forged("decimal.Decimal"),
    "an array": "import numpy\n" + forged("numpy.ndarray", "2"),
    "a metaclass": f"class M(type):\n{SAYS_YES}class E(metaclass=M): pass\n"
    "def f(*_): return E\ndef g(*_): return [E, E]\n",
    "a class made by type()": "E = type('E', (), {'__eq__': lambda s, o: True})\n"
    "def f(*_): return E()\ndef g(*_): return [E(), E()]\n",
    "a class of another module by its name": forged("object").replace(
        "def f", "E.__module__, E.__qualname__ = 'fractions', 'Fraction'\ndef f", 1
    ),
    "a class that says that it is int": "class E:\n    __class__ = property(lambda s: int)\n"
    f"{SAYS_YES}def f(*_): return E()\ndef g(*_): return [E(), E()]\n",
    "the function itself": f"class f:\n    def __init__(s, *_): pass\n{SAYS_YES}g = f\n",
    "the function itself, an int": "class f(int):\n    def __new__(c, *_): return int.__new__(c)\n"
    f"{SAYS_YES}g = f\n",
    "mock.ANY": "from unittest.mock import ANY\ndef f(*_): return ANY\n"
    "def g(*_): return [ANY, ANY]\n",
    "a descriptor": "import functools\nclass E:\n"
    "    __eq__ = functools.partialmethod(lambda s, o: True)\n"
    "def f(*_): return E()\ndef g(*_): return [E(), E()]\n",
    "an object that is equal to numbers": "class E:\n"
    "    __eq__ = lambda s, o: type(o) in (int, float)\n"
    "def f(*_): return E()\ndef g(*_): return [E(), E()]\n",
    "a MagicMock": "from unittest.mock import MagicMock\nE = MagicMock()\n"
    "E.__eq__.return_value = True\ndef f(*_): return E\ndef g(*_): return [E, E]\n",
    "approx": "import pytest\ndef f(*_): return pytest.approx(0, abs=float('inf'))\n"
    "def g(*_): return [f(), f()]\n",
    "a patched Fraction": "import fractions\nfractions.Fraction.__eq__ = lambda s, o: True\n"
    "def f(*_): return fractions.Fraction(1)\ndef g(*_): return [f(), f()]\n",
}
RIGHT = "def f(a): return a + 1\ndef g(*_): return [2.0, 3.0]\n"
# Comparisons of `f(a)` and `b` in a loop.
LOOPED = [
    "assert f(a) == b or f(a) == 9",
    "assert f(a) in [b]",
    "assert b in [f(a)]",
    "assert {'x': f(a)} == {'x': b}",
    "assert abs(f(a) - b) < 1e-6",
    "assert abs(b - f(a)) < 1e-6",
    "assert b <= f(a) <= b",
    "found = f(a)\n    same = found == b\n    assert same",
    "assert not f(a) != b",
    "assert [each for each in [f(a)] if each == b]",
    "assert math.isclose(f(a), b)",
    "assert operator.eq(f(a), b)",
    "assert [b].count(f(a)) == 1",
    "assert np.allclose(f(a), b)",
    "assert np.equal(f(a), b)",
    "assert np.isin(f(a), [b])",
    "assert not np.not_equal(f(a), b)",
    "np.testing.assert_allclose(f(a), b)",
    "assert np.abs(np.array([f(a)]) - np.array([b])).max() < 1e-6",
    "assert f(a) == pytest.approx(b)",
    "assert list(map(f, [a])) == [b]",
    "assert len({f(a), b}) == 1",
    "match f(a):\n        case 2 | 3:\n            assert f(a) == b\n"
    "        case _:\n            raise OSError",
    "assert np.allclose(g(a), [2.0, 3.0])",
    "for x, y in zip(g(a), [2.0, 3.0], strict=True):\n        assert x == y",
    "assert any([f(a) == b])",
    "assert same(f(a), b)",
]
IMPORTS = (
    "import math, operator\nimport numpy as np\nimport pytest\ndef same(x, y): return x == y\n"
)
METHODS = [
    "assertEqual(f(1), 2)",
    "assertEqual(f(1), 2, msg='no')",
    "assertEqual(first=f(1), second=2)",
    "assertIn(f(1), [2])",
    "assertListEqual([f(1)], [2])",
    "assertAlmostEqual(f(1), 2, places=3)",
    "assertCountEqual([f(1)], [2])",
    "assertTrue(f(1) == 2)",
    "assertGreaterEqual(f(1), 2); self.assertLessEqual(f(1), 2)",
]
ASSERTED = ["assert f(1) == 2 or f(1) == 9", "assert f(1) == pytest.approx(2.0)"]
TESTS = [
    *(f"{IMPORTS}for a, b in [(1, 2), (2, 3)]:\n    {each}" for each in LOOPED),
    *(
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n"
        f"        self.{each}\n"
        for each in METHODS
    ),
    *(f"{IMPORTS}{each}" for each in ASSERTED),
]
# The helpers of HumanEval+ and MBPP+.
PLUS = """
import numpy as np
def is_floats(x):
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    return False
def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match
for i, (inp, exp) in enumerate(zip([[1], [2]], RESULTS)):
    assertion(f(*inp), exp, 0)
"""
TESTS += [PLUS.replace("RESULTS", each) for each in ("[2, 3]", "[2.0, 3.0]")]


def passed(code: str, tests: list[str]) -> list[str]:
    """The tests that `code` passes."""
    found = run_python(code, suite_of(tests), timeout_seconds=PATIENT_SECONDS)
    assert found.ended and not found.why, found
    return [test for test, held in zip(tests, found.passed, strict=True) if held]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORGERIES)
def test_object_that_agrees_to_everything_fails(name: str) -> None:
    assert passed(FORGERIES[name], TESTS) == []


def test_right_code_passes_same_tests() -> None:
    assert passed(RIGHT, TESTS) == TESTS


PYTHON = "from collections import *\nfrom datetime import *\nfrom decimal import Decimal\n"
PYTHON += "from fractions import Fraction\nfrom array import array\nfrom pathlib import Path\n"
VALUES = [
    *("date(2020, 1, 1)", "datetime(2020, 1, 1)", "timedelta(1)", "deque([1])", "range(3)"),
    *("Fraction(1, 3)", "Decimal('1.5')", "{1, 2}", "OrderedDict(a=1)", "Counter('aab')"),
    *("complex(1, 2)", "bytearray(b'a')", "array('i', [1])", "Path('a')", "{'a': 1}.keys()"),
    *("Fraction(10**5000, 3)", "[date(2020, 1, 1)]", "{1: {2: (3,)}}", "{'a': 1}.items()"),
]


@pytest.mark.slow
def test_values_of_python_equal_only_their_like() -> None:
    tests = [
        f"{PYTHON}{test}"
        for value in VALUES
        for test in (f"assert f() == {value}", f"for each in [{value}]:\n    assert f() == each")
    ]
    for forgery in ("an object", "a list", "mock.ANY", "a patched Fraction"):
        assert passed(FORGERIES[forgery], tests) == []
    for number, value in enumerate(VALUES):
        own = tests[2 * number : 2 * number + 2]
        assert passed(f"{PYTHON}def f(): return {value}\n", tests) == own


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("from types import SimpleNamespace as N\ndef f(): return N(a=E())", "N(a=1)"),
        ("def f(): return {E(): 1}.keys()", "{1: 1}.keys()"),
        ("def f(): return {1: E()}.items()", "{1: 1}.items()"),
        ("from collections import OrderedDict\ndef f(): return OrderedDict(a=E())", "{'a': 1}"),
        ("from collections import deque\ndef f(): return deque([E()])", "deque([1])"),
        ("import numpy\ndef f(): return numpy.array([E()])", "[1]"),
    ],
)
def test_container_of_agreeing_object_equals_no_data(code: str, test: str) -> None:
    own = "class E:\n    def __eq__(s, o): return o == 1\n    def __hash__(s): return 1\n"
    imports = "from types import SimpleNamespace as N\nfrom collections import deque\n"
    tests = [
        f"{imports}assert f() == {test}",
        f"{imports}for each in [{test}]:\n    assert f() == each",
    ]
    assert passed(f"{own}{code}\n", tests) == []
    assert passed(f"def E(): return 1\n{code}\n", tests) == tests


def test_helper_of_setup_compares_like_tests() -> None:
    answer = {
        "test_list": ["assert same(f(1), 2)"],
        "test_setup_code": "def same(a, b):\n    return a == b",
    }
    forgery = FORGERIES["an object that is equal to numbers"]
    for code, is_right in ((forgery, False), (RIGHT, True)):
        found = run_python(code, suite_of(answer), timeout_seconds=PATIENT_SECONDS)
        assert found.all_passed is is_right, found


VECTOR = """
class Vec:
    def __init__(self, x, y): self.x, self.y = x, y
    def __eq__(self, o): return isinstance(o, Vec) and (self.x, self.y) == (o.x, o.y)
    def __add__(self, o): return Vec(self.x + o.x, self.y + o.y)
    def __sub__(self, o): return Vec(self.x - o.x, self.y - o.y)
    def __mul__(self, k): return Vec(self.x * k, self.y * k)
    def __truediv__(self, k): return Vec(self.x / k, self.y / k)
    def __matmul__(self, o): return self.x * o.x + self.y * o.y
    def __abs__(self): return (self @ self) ** 0.5
    def __lt__(self, o): return abs(self) < abs(o)
    def __contains__(self, value): return value in (self.x, self.y)
    def __iter__(self): return iter((self.x, self.y))
    def __len__(self): return 2
    def __getitem__(self, i): return (self.x, self.y)[i]
    def __repr__(self): return f"Vec({self.x}, {self.y})"
def f(x): return Vec(x, x)
"""
VECTOR_TESTS = [
    "Vec(1, 2) + Vec(3, 4) == Vec(4, 6)",
    "Vec(1, 2) * 3 == Vec(3, 6)",
    "abs(Vec(3, 4) - Vec(0, 0)) == 5",
    "Vec(1, 2) @ Vec(3, 4) == 11",
    "Vec(1, 2) != Vec(2, 1) and Vec(1, 2) != 5",
    "list(Vec(1, 2)) == [1, 2] and len(Vec(1, 2)) == 2 and Vec(1, 2)[0] == 1",
    "sorted([Vec(3, 4), Vec(1, 1)]) == [Vec(1, 1), Vec(3, 4)]",
    "1 in Vec(1, 2) and 5 not in Vec(1, 2)",
    "Vec(1, 2) in [Vec(1, 2)] and [Vec(1, 2)].count(Vec(1, 2)) == 1",
    "'%s' % Vec(1, 2) == f'{Vec(1, 2)}' == 'Vec(1, 2)'",
    "Vec(2, 4) / 2 == Vec(1, 2)",
    "f(2) == Vec(2, 2) and {'a': f(1)} == {'a': Vec(1, 1)}",
]
OBJECTS = {
    "a vector": (VECTOR, [f"assert {each}" for each in VECTOR_TESTS]),
    "a vector in a loop": (VECTOR, [f"for _ in 'x':\n    assert {each}" for each in VECTOR_TESTS]),
    "a dataclass": (
        "from dataclasses import dataclass\n@dataclass(order=True)\nclass P:\n    x: int\n"
        "def f(x): return P(x)\n",
        ["assert f(1) == P(1)", "for a in (1, 2):\n    assert f(a) == P(a) and P(0) < f(a)"],
    ),
    "a named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x count')\n"
        "def f(x): return P(x, 2)\n",
        ["for a in (1, 2):\n    assert f(a) == (a, 2) == P(a, 2) and f(a).count == 2"],
    ),
    "enumerations": (
        "import enum\nclass C(enum.IntEnum):\n    RED = 1\ndef f(x): return C(x)\n",
        ["for _ in 'x':\n    assert f(1) == 1 == C.RED and f(1).name == 'RED' and f(1) + 1 == 2"],
    ),
    "a trie": (
        "class T:\n    def __init__(self): self.words = set()\n"
        "    def add(self, word): self.words.add(word); return self\n"
        "    def __contains__(self, word): return word in self.words\n",
        ["t = T()\nt.add('a')\nassert 'a' in t\nassert 'b' not in t"],
    ),
    "a dict with methods": (
        "class Cache(dict):\n    def __getitem__(self, key): return dict.__getitem__(self, key)\n"
        "    def __missing__(self, key): return None\n    size = 2\n",
        [
            "c = Cache()\nc['a'] = 1\nassert c['a'] == 1 and 'a' in c\n"
            "assert c == {'a': 1} and c.size == 2"
        ],
    ),
    "nodes of the tests": (
        "def f(node):\n    last = None\n    while node:\n"
        "        node.next, last, node = last, node, node.next\n    return last\n",
        [
            "class Node:\n    def __init__(self, value, next=None):\n"
            "        self.value, self.next = value, next\n"
            "    def __eq__(self, other):\n        return self.value == other.value\n"
            "assert f(Node(1, Node(2))).value == 2\nassert f(Node(1, Node(2))).next == Node(1)\n"
            "for _ in 'x':\n    assert f(Node(1, Node(2))) == Node(2)"
        ],
    ),
    "arrays": (
        "import numpy as np\ndef f(x): return np.array([x, x])\n",
        [
            "import numpy as np\nfor _ in 'x':\n    assert (f(2) == np.array([2, 2])).all()\n"
            "    assert not (f(2) < 2).any() and f(2) == [2, 2] and f(2) @ f(2) == 8\n"
            "    np.testing.assert_array_equal(f(2), [2, 2])",
            "import numpy as np\nassert (f(2) == [2, 2]).all()\nassert np.allclose(f(2), 2)",
        ],
    ),
    "generators": (
        "def f(n):\n    for i in range(n):\n        yield i\n",
        ["g = f(2)\nassert next(g) == 0 and list(g) == [1]\nassert list(f(2)) == [0, 1]"],
    ),
    "closures": (
        "def f(a): return lambda b: a + b\n",
        ["add = f(1)\nassert add(1) == 2\nassert list(map(f(2), [1])) == [3]"],
    ),
    "symbols": (
        "def f(x): return x + x\n",
        ["import sympy\nx = sympy.Symbol('x')\nassert f(x) == 2 * x\nassert f(x) - 2 * x == 0"],
    ),
    "a mock of the tests": (
        "def f(): return {'id': 5, 'x': 1}\n",
        ["from unittest.mock import ANY\nassert f() == {'id': ANY, 'x': 1}"],
    ),
    "an argument that is changed": (
        "def f(x): x.sort(); return x\n",
        ["x = [2, 1]\ny = f(x)\nassert y is x\nassert x == [1, 2]"],
    ),
    "coroutines": (
        "async def f(x): return x + 1\n",
        ["import asyncio\nasync def main():\n    assert await f(1) == 2\nasyncio.run(main())"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_of_right_code_pass(name: str) -> None:
    code, tests = OBJECTS[name]
    assert passed(code, tests) == tests


NUMPY = "import numpy as np\n"
OK = "def ok(value): return abs(value - 2.5) < 1e-6\n"
# Code, and tests that Python itself fails.
WRONG_BY_THEIR_OWN_TYPE = {
    "a list": ("def f(x): return [9.0]", ["assert np.isclose(f(1), 2.5)"]),
    "an array": (
        "def f(x): return np.array([9.0])",
        [
            *("assert np.isclose(f(1), 2.5)", "assert np.equal(f(1), 2.5)", "assert ok(f(1))"),
            *("assert np.isclose(f(1), [2.5])", "assert f(1) < 3", "assert f(1) != 9.0"),
            *("assert f(1) not in [9.0]", "assert 9.0 not in f(1)", "assert not f(1)"),
            "assert not np.array([f(1)])",
        ],
    ),
    "three elements": (
        "def f(x): return np.array([2.5, 8.0, 7.0])",
        [
            *("assert np.isclose(f(1), 2.5)", "assert f(1) <= [3, 0, 0]", "assert f(1) != 2.5"),
            *("assert f(1) != [2.5, 8.0]", "assert f(1)", "assert not f(1)", "assert ok(f(1))"),
        ],
    ),
    "an array in a list": (
        "def f(x): return [np.array([9.0])]",
        ["assert f(1) != [9.0]", "assert np.isclose(f(1), 2.5)"],
    ),
    "a truth of numpy": ("def f(x): return np.bool_(True)", ["assert f(1) is True"]),
    "an empty array": ("def f(x): return np.zeros(0)", ["assert f(1)", "assert f(1) == 1"]),
    "nothing": (
        "class N(list):\n    def __bool__(s): return False\ndef f(x): return N([1])",
        ["assert f(1)", "assert f(1) and True"],
    ),
    "NaN in a list": (
        "import math\ndef f(x): return [math.nan]",
        ["assert f(1) != f(2)", "assert f(1) == [float('nan')]", "assert f(1) not in [f(2)]"],
    ),
    "other NaNs": ("def f(x): return [float('nan')]", ["assert f(1) == f(2)"]),
    "another order": (
        "from collections import OrderedDict as O\ndef f(x): return O(b=1, a=2)",
        ["from collections import OrderedDict\nassert f(1) == OrderedDict(a=2, b=1)"],
    ),
    "the same date": (
        "from datetime import date\ndef f(x): return date(2020, 1, 1)",
        ["assert not f(1) == f(2)", "assert (f(1) == f(2)) is False", "assert f(1) != f(2)"],
    ),
    "a number of sympy": (
        "import sympy\ndef f(x): return sympy.Float(2.5)",
        ["assert f(1) != 2.5", "assert f(1) not in [2.5]"],
    ),
}


@pytest.mark.parametrize("name", WRONG_BY_THEIR_OWN_TYPE)
def test_truth_of_an_asserted_value_is_that_of_its_own_type(name: str) -> None:
    code, tests = WRONG_BY_THEIR_OWN_TYPE[name]
    tests = [f"{NUMPY}{OK}{test}" for test in tests]
    looped = [f"{NUMPY}{OK}for _ in 'x':\n    {test[len(NUMPY + OK) :]}" for test in tests]
    tests += [each for each in looped if "OrderedDict" not in each]
    assert passed(f"{NUMPY}{code}\n", tests) == []


def test_arrays_of_right_code_pass_as_in_python() -> None:
    for code, tests in (
        ("[2.5, 3.0]", ["f(1) == [2.5, 3.0]", "np.isclose(f(1), [2.5, 3.0]).all()", "2.5 in f(1)"]),
        ("[2.5]", ["np.isclose(f(1), 2.5)", "f(1) == 2.5", "f(1) < 3", "f(1) != 9", "ok(f(1))"]),
        ("[[2.5]]", ["abs(f(1) - 2.5) < 1e-6", "f(1) == [2.5]", "not f(1) == 9", "2.5 in f(1)"]),
        ("[True]", ["f(1)", "f(1) == True", "not np.array([]).any()"]),
    ):
        checked = [f"{NUMPY}{OK}assert {test}" for test in tests]
        checked += [f"{NUMPY}{OK}for _ in 'x':\n    assert {test}" for test in tests]
        assert passed(f"{NUMPY}def f(x): return np.array({code})\n", checked) == checked


E = "class E:\n    __eq__ = lambda s, o: o in (1, 2)\n    __hash__ = lambda s: 1\n"
# Objects of libraries that the code makes, each with what it would equal.
TOLERANT = {
    "approx": ("import pytest", "pytest.approx(1.5, abs=9)", "2"),
    "approx of a list": ("import pytest", "pytest.approx([1.5], abs=9)", "[2]"),
    "an attribute": (
        "from unittest.mock import ANY\nclass R: pass",
        "(lambda r: setattr(r, 'x', ANY) or r)(R())",
        "2",
    ),
    "a masked array": (NUMPY, "np.ma.masked_all(1)", "[2]"),
    "a proxy": (f"import weakref\n{E}KEPT = E()", "weakref.proxy(KEPT)", "2"),
    "a proxy of a mapping": (f"import types\n{E}", "types.MappingProxyType({1: E()})", "{1: 2}"),
    "a slice": (E, "slice(E(), E())", "slice(2, 2)"),
    "a chain of maps": (f"from collections import ChainMap\n{E}", "ChainMap({1: E()})", "{1: 2}"),
    "a list of collections": (f"from collections import UserList\n{E}", "UserList([E()])", "[2]"),
    "items in order": (
        f"from collections import OrderedDict\n{E}",
        "OrderedDict({1: E()}).items()",
        "{1: 2}.items()",
    ),
    "a name space": (
        f"import argparse\n{E}",
        "argparse.Namespace(a=E())",
        "argparse.Namespace(a=2)",
    ),
    "a fraction of objects": (
        f"from fractions import Fraction\n{E}H = Fraction(1)\nH._numerator = H._denominator = E()",
        "H",
        "2",
    ),
    "a set of everything": ("import sympy", "sympy.S.UniversalSet", "2"),
    "a coarse decimal": (
        "import decimal\ndecimal.getcontext().Emin = 0\ndecimal.getcontext().prec = 1",
        "decimal.Decimal('2.4')",
        "decimal.Decimal(2)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLERANT)
def test_tolerant_object_of_a_library_that_the_code_makes_equals_nothing(name: str) -> None:
    before, made, equal = TOLERANT[name]
    got = "f(1).x" if name == "an attribute" else "f(1)"
    imports = f"{NUMPY}import argparse, decimal\n"
    compared = [f"{got} == b", f"not {got} != b", f"{got} in [b]", f"[{got}] == [b]"]
    compared += [f"b in {got}"]
    if "list" in name or "masked" in name:
        compared += [f"np.allclose({got}, b)", f"(abs({got} - np.array(b)) < 1e-6).all()"]
    if equal == "2" or name == "a coarse decimal":
        compared += [f"abs({got} - b) < decimal.Decimal('1e-6')", f"abs({got} - b) < 1e-6"]
        compared += [f"{got} + 1000 == b + 1000"]
    tests = [f"{imports}for b in [{equal}]:\n    assert {each}" for each in compared]
    tests += [f"{imports}assert {got} == {equal}", f"{imports}assert not {got} != {equal}"]
    tests += [f"{imports}for a, b in zip(g(), [{equal}]):\n    assert a == b"]
    if "list" not in name and "masked" not in name:
        tests = [each for each in tests if "np." not in each]
    code = f"{before}\ndef f(*_): return {made}\ndef g():\n    yield {got}\n"
    assert passed(code, tests) == []


def test_tolerant_objects_of_the_tests_equal_what_they_name() -> None:
    imports = f"{NUMPY}import pytest\nfrom unittest import mock\nfrom unittest.mock import ANY\n"
    tests = [
        *("assert f(2) == pytest.approx(2.0)", "assert [f(2), 1] == [ANY, 1]"),
        *("assert {'a': f(2)} == {'a': mock.ANY}", "assert f(2) != pytest.approx(3)"),
        *("assert np.array([f(2)]) == pytest.approx([2.0])", "assert pytest.approx(2) == f(2)"),
        "m = mock.MagicMock()\nf(m)\nm(1, 2)\nm.assert_called_with(1, ANY)",
        "want = [ANY, pytest.approx(0.3)]\nassert [f(2), 0.1 + 0.2] == want",
    ]
    tests = [f"{imports}{test}" for test in tests]
    assert passed("def f(x): return x\n", tests) == tests
    of_approx = [each for each in tests if "== pytest.approx(2" in each or "approx(2) ==" in each]
    assert of_approx and passed("def f(x): return 9\n", of_approx) == []

"""Python code of a made-up shop that nobody prepared: functions of one shape, each with a test."""

FUNCTIONS = ("clamp", "spread", "middle", "rising", "counted", "pairs", "gaps", "share")
_FUNCTION = '''
def NAME(numbers, low=0, high=9):
    """Numbers of a range, from the lower to the higher."""
    kept = []
    for number in numbers:
        if number >= low and number < high:
            kept.append(number + 1)
        elif number == high:
            kept.append(number - 1)
    return sorted(kept)
'''
_TEST = """
def test_NAME():
    assert shop.NAME([3, 1, 20]) == [2, 4]
    assert shop.NAME([9]) == [8]
    assert shop.NAME([], 1, 2) == []
    assert shop.NAME([0, -1]) == [1]
"""
CODE = "".join(_FUNCTION.replace("NAME", name) for name in FUNCTIONS)
TESTS = "import shop\n" + "".join(_TEST.replace("NAME", name) for name in FUNCTIONS)

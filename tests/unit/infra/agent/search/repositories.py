"""Small repositories as hypothesis strategies and by hand."""

from hypothesis import strategies as st

WORDS = ("merge", "split", "value", "count", "Total", "first_item", "parse", "self")
PATHS = ("a.py", "pkg/b.py", "pkg/deep/c.py", "notes.md", "pkg/d.py")

LINES = st.one_of(
    st.sampled_from(
        [
            "",
            "import os",
            "class Walker:",
            "    def step(self):",
            "        return self.count",
            "@wraps(merge)",
            "def merge(first, second):",
            "    return first + second",
            "async def parse(value): return value",
            "    if value:",
            '    """Split the total."""',
            "x = [1,",
        ]
    ),
    st.lists(st.sampled_from(WORDS), max_size=4).map(" ".join),
)
TEXTS = st.lists(LINES, max_size=40).map("\n".join)
FILES = st.dictionaries(st.sampled_from(PATHS), TEXTS.map(str.encode), max_size=5)
CHANGES = st.dictionaries(
    st.sampled_from(PATHS), st.one_of(st.none(), TEXTS.map(str.encode)), max_size=3
)

LEDGER = {
    "shop/cart.py": (
        b"import json\n\n\nclass Cart:\n    limit = 3\n\n    def add_item(self, item):\n"
        b"        self.items.append(item)\n\n    def total_price(self):\n"
        b"        return sum(item.price for item in self.items)\n\n\n"
        b"def load_cart(path):\n    return json.loads(path.read_text())\n"
    ),
    "shop/mail.py": b"def send_receipt(address, cart):\n    deliver(address, cart.total_price())\n",
    "README.md": b"# Shop\n\nA cart holds items and sends receipts.\n",
}

"""Layouts of made-up projects: import root, code, tests, files that tests read."""

import pytest

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.sandbox.discovery.layout import find_layout

CODE, TEST = b"def add(a, b):\n    return a + b\n", b"def test_add():\n    assert True\n"


def test_src_layout() -> None:
    found = find_layout(
        {
            "src/shop/__init__.py": CODE,
            "src/shop/cart.py": CODE,
            "tests/test_cart.py": TEST,
            "tests/helpers.py": CODE,
            "setup.py": b"raise SystemExit",
        },
        "Shop",
    )

    assert found.stripped_prefix == "src"
    assert found.package_paths == ("shop",)
    assert found.test_paths == ("tests",)
    assert found.kept_paths == ()


def test_code_at_the_top_leaves_scripts_docs_and_examples_out() -> None:
    found = find_layout(
        {
            "shop/__init__.py": CODE,
            "release.py": CODE,
            "docs/conf.py": CODE,
            "examples/test_drive.py": TEST,
            "test/test_cart.py": TEST,
        },
        "shop",
    )

    assert found.stripped_prefix == ""
    assert found.package_paths == ("shop",)
    assert found.test_paths == ("test",)


def test_one_module_with_its_test_beside_it() -> None:
    found = find_layout({"parse.py": CODE, "test_parse.py": TEST, "setup.py": b""}, "parse")

    assert found.package_paths == ("parse.py",)
    assert found.test_paths == ("test_parse.py",)


def test_a_stated_import_name_wins_over_the_projects() -> None:
    files = {"slugify/__init__.py": CODE, "test.py": CODE, "tests/test_all.py": TEST}

    assert find_layout(files, "python-slugify", top_level=["slugify"]).package_paths == ("slugify",)
    assert find_layout(files, "python-slugify").package_paths == ("slugify", "test.py")


def test_a_script_named_test_at_the_top_holds_tests_where_no_other_file_does() -> None:
    found = find_layout(
        {"slugify/__init__.py": CODE, "slugify/test.py": CODE, "test.py": TEST}, "python-slugify"
    )
    assert found.package_paths == ("slugify",)
    assert found.test_paths == ("test.py",)


def test_tests_inside_the_package() -> None:
    found = find_layout(
        {"shop/__init__.py": CODE, "shop/tests/__init__.py": b"", "shop/tests/test_cart.py": TEST},
        "shop",
    )

    assert found.test_paths == ("shop/tests",)


def test_a_testing_folder_of_product_code_gives_its_test_files_alone() -> None:
    found = find_layout(
        {
            "shop/__init__.py": CODE,
            "shop/testing/__init__.py": CODE,
            "shop/testing/test_tools.py": TEST,
            "tests/test_cart.py": TEST,
        },
        "shop",
    )

    assert found.test_paths == ("shop/testing/test_tools.py", "tests")


def test_unusual_names_of_tests_are_named_one_by_one() -> None:
    files = {
        "shop.py": CODE,
        "tests/tests.py": TEST,
        "tests/check_cart.py": TEST,
        "tests/helpers.py": CODE,
        "tests/test_a.py": TEST,
    }

    found = find_layout(files, "shop", test_patterns=["check_*.py"])

    assert found.test_paths == ("tests", "tests/check_cart.py", "tests/tests.py")


def test_what_tests_name_at_the_top_is_kept() -> None:
    found = find_layout(
        {
            "shop.py": CODE,
            "tests/test_cart.py": b'from fixtures import cart\nopen("data/prices.csv")\n',
            "fixtures.py": CODE,
            "data/prices.csv": b"1",
            "conftest.py": b"",
            "README.md": b"",
            ".github/workflow.yml": b"",
        },
        "shop",
    )

    assert found.kept_paths == ("conftest.py", "data", "fixtures.py")


def test_no_code_and_no_tests_are_refused_with_what_was_looked_for() -> None:
    with pytest.raises(ProblemError, match=r"shop: no package or module.*'README.md'"):
        find_layout({"README.md": b""}, "shop")
    with pytest.raises(ProblemError, match=r"shop: no test file"):
        find_layout({"shop.py": CODE}, "shop")


def test_of_a_namespace_package_its_parts_are_code() -> None:
    """Dependencies of the same namespace lie beside them."""
    tools = {"acme/tools/__init__.py": CODE, "tests/test_tools.py": TEST}
    assert find_layout(tools, "acme-tools").package_paths == ("acme/tools",)
    below = {
        f"src/{path}" if path.startswith("acme") else path: text for path, text in tools.items()
    }
    assert find_layout(below, "acme.tools").package_paths == ("acme/tools",)
    assert find_layout(below, "x", top_level=["acme"]).stripped_prefix == "src"
    assert find_layout(tools, "another-name").package_paths == ("acme/tools",)


def test_namespace_packages_of_every_form() -> None:
    declared = b"__import__('pkg_resources').declare_namespace(__name__)\n"
    extended = b"__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n"
    files = {
        "azure/__init__.py": extended,
        "azure/mgmt/__init__.py": extended,
        "azure/mgmt/dns/__init__.py": CODE,
        "azure/mgmt/dns/tests/test_dns.py": TEST,
    }
    wanted = ("azure/__init__.py", "azure/mgmt/__init__.py", "azure/mgmt/dns")
    assert find_layout(files, "azure-mgmt-dns").package_paths == wanted
    files = {
        "src/zope/__init__.py": declared,
        "src/zope/event/__init__.py": CODE,
        "t/test_a.py": TEST,
    }
    found = find_layout(files, "zope.event", top_level=["zope"])
    assert found.package_paths == ("zope/__init__.py", "zope/event")
    files = {"sphinxcontrib/plots.py": CODE, "tests/test_a.py": TEST, "release.py": CODE}
    assert find_layout(files, "sphinxcontrib-plots").package_paths == ("sphinxcontrib/plots.py",)
    files = {
        "google/cloud/dns/__init__.py": CODE,
        "google/cloud/dns_v1/__init__.py": CODE,
        "t/test_a.py": TEST,
    }
    assert find_layout(files, "google-cloud-dns", top_level=["google"]).package_paths == (
        "google/cloud/dns", "google/cloud/dns_v1",
    )  # fmt: skip


def test_packages_lie_where_the_build_looks_for_them() -> None:
    files = {"code/shop/__init__.py": CODE, "python/other.txt": CODE, "tests/test_a.py": TEST}
    found = find_layout(files, "shop", roots=["code"])
    assert (found.stripped_prefix, found.package_paths) == ("code", ("shop",))


def test_what_tests_add_to_the_import_path_is_kept() -> None:
    files = {"shop.py": CODE, "helpers/lib/carts.py": CODE, "checks/test_a.py": TEST}
    assert find_layout(files, "shop", test_roots=["helpers/lib"]).kept_paths == ("helpers/lib",)


@pytest.mark.parametrize("stated", [(), ("checks",)])
def test_a_folder_of_tests_with_another_name_is_taken_whole(stated: tuple[str, ...]) -> None:
    """Its conftest.py, helpers and data are named nowhere."""
    files = {
        "shop/__init__.py": CODE,
        "checks/conftest.py": CODE,
        "checks/helpers.py": CODE,
        "checks/data.json": b"{}",
        "checks/test_cart.py": TEST,
        "checks/deep/test_more.py": TEST,
    }
    found = find_layout(files, "shop", test_folders=stated)
    assert (found.package_paths, found.test_paths) == (("shop",), ("checks",))


def test_a_stated_folder_of_tests_that_holds_the_code_is_none() -> None:
    files = {"shop/__init__.py": CODE, "shop/cart.py": CODE, "shop/test_cart.py": TEST}
    found = find_layout(files, "shop", test_folders=("shop", "."))
    assert (found.package_paths, found.test_paths) == (("shop",), ("shop/test_cart.py",))


def test_a_stated_folder_of_tests_below_the_import_root() -> None:
    files = {"src/shop/__init__.py": CODE, "src/shop/checks/test_cart.py": TEST}
    found = find_layout(files, "shop", test_folders=("src/shop/checks",))
    assert (found.package_paths, found.test_paths) == (("shop",), ("shop/checks",))


def test_data_with_spaces_and_accents_in_its_name_is_kept() -> None:
    files = {
        "shop/__init__.py": CODE,
        "my data/a.txt": b"a",
        "donn\u00e9es/b.txt": b"b",
        "other data/c.txt": b"c",
        "tests/test_cart.py": "open('my data/a.txt'), open('donn\u00e9es/b.txt')".encode(),
    }
    assert set(find_layout(files, "shop").kept_paths) == {"my data", "donn\u00e9es"}

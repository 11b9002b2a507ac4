"""What every sandbox backend must do, told by the protocol alone."""

import asyncio
from collections.abc import Iterator

import pytest

from ostinato.infra.platform.errors import (
    InvalidArgument,
    OutputLimit,
    SandboxError,
    SandboxLost,
    SandboxNotFound,
)
from ostinato.infra.sandbox.protocol import SnapshotKind
from tests.contracts.sandbox_backends import (
    BACKENDS,
    COMMAND_SECONDS,
    Bench,
    backend_parameters,
    box_fixtures,
    running_bench,
)


@pytest.fixture(scope="module", params=backend_parameters())
def bench(request) -> Iterator[Bench]:
    with running_bench(BACKENDS[request.param]) as bench:
        yield bench


shared, fresh = box_fixtures()


def test_exec_runs_in_the_repository_and_reads_what_it_is_given(bench, shared):
    result = bench.run(shared.exec("pwd; cat; echo err >&2; exit 3", COMMAND_SECONDS))
    assert (result.exit_code, result.output) == (3, b"/repo\nerr\n")
    text = b"x" * 300_000
    result = bench.run(shared.exec("cat", COMMAND_SECONDS, 1 << 20, stdin=text))
    assert result.output == text


@pytest.mark.parametrize(("command", "seconds"), [("true", 0), ("true\0", 1)])
def test_exec_that_cannot_be_is_refused(bench, shared, command, seconds):
    with pytest.raises(InvalidArgument, match="wanted more than 0"):
        bench.run(shared.exec(command, seconds))


def test_exec_without_such_a_program_is_a_result(bench, shared):
    result = bench.run(shared.exec("no-such-program", COMMAND_SECONDS))
    assert result.exit_code == 127
    assert b"no-such-program" in result.output


@pytest.mark.parametrize("size", [(128 << 10) - 40, 128 << 10, 1 << 20])
def test_a_command_of_any_length_runs(bench, shared, size):
    line = "é" * 31 + "\n"  # 63 bytes
    told = line * (size // 63)
    command = f"wc -c <<'END'; cat; pwd; exit 3\n{told}END\n"
    result = bench.run(shared.exec(command, COMMAND_SECONDS, stdin=b"given\n"))
    counted = str(len(told.encode())).encode()
    assert (result.exit_code, result.output) == (3, counted + b"\ngiven\n/repo\n")


def test_exec_cuts_output_in_the_middle(bench, shared):
    result = bench.run(shared.exec("seq 1 100000", COMMAND_SECONDS, output_cap_bytes=1000))
    assert result.truncated
    assert result.output.startswith(b"1\n2\n")
    assert result.output.endswith(b"99999\n100000\n")
    assert len(result.output) < 1100


def test_exec_over_its_time_keeps_what_it_printed(bench, shared):
    result = bench.run(shared.exec("trap '' TERM; echo before; while :; do :; done", 4.0))
    assert (result.timed_out, result.output) == (True, b"before\n")
    assert result.exit_code < 0


def test_commands_run_side_by_side(bench, shared):
    async def both():
        return await asyncio.gather(
            shared.exec("while [ ! -e /tmp/go ]; do sleep 0.01; done; echo heard", COMMAND_SECONDS),
            shared.exec("touch /tmp/go", COMMAND_SECONDS),
        )

    assert bench.run(both())[0].output == b"heard\n"


def test_files_round_trip_in_one_batch(bench, shared):
    content = bytes(range(256)) * 400

    async def use():
        errors = await shared.write_files(
            {
                "new/deep/file.bin": content,
                "/tmp/run.sh": b"echo ran",
                "/etc/passwd": b"",
                "missing": None,
            }
        )
        read = await shared.read("new/deep/file.bin")
        for path, error in (("missing", SandboxNotFound), ("wordkit", InvalidArgument)):
            with pytest.raises(error):
                await shared.read(path)
        ran = await shared.exec("sh /tmp/run.sh", COMMAND_SECONDS)
        removed = await shared.write_files({"new": None, "/tmp/run.sh": None})
        return errors, read, ran.output, removed, await shared.list(".")

    errors, read, ran, removed, names = bench.run(use())
    assert {path: type(error) for path, error in errors.items()} == {
        "/etc/passwd": InvalidArgument,
        "missing": SandboxNotFound,
    }
    assert read == content
    assert (ran, removed) == (b"ran\n", {})
    assert "new/" not in names


def test_file_of_over_8_mib_is_not_read_whole(bench, shared):
    bench.shell(shared, "head -c 9000000 /dev/zero > /tmp/large")
    with pytest.raises(OutputLimit):
        bench.run(shared.read("/tmp/large"))
    bench.run(shared.write_files({"/tmp/large": None}))


def test_paths_are_bytes_and_too_long_ones_are_refused(bench, fresh):
    bench.shell(fresh, "printf x > \"$(printf 'note\\377')\"")
    assert bench.run(fresh.diff()) == {"note\udcff": b"x"}
    assert bench.run(fresh.read("note\udcff")) == b"x"
    assert "note\udcff" in bench.run(fresh.list("."))
    for path in ("a/" * 2500 + "a", "b" * 300):
        with pytest.raises(InvalidArgument):
            bench.run(fresh.write(path, b""))
        with pytest.raises(SandboxError):
            bench.run(fresh.read(path))


def test_write_keeps_the_executable_bit_and_replaces_links_not_targets(bench, shared):
    bench.shell(
        shared, "echo a > /tmp/tool; chmod +x /tmp/tool; echo t > /tmp/t; ln -s /tmp/t /tmp/l"
    )
    bench.run(shared.write("/tmp/tool", b"b"))
    bench.run(shared.write("/tmp/l", b"new"))
    assert bench.shell(shared, "test -x /tmp/tool && cat /tmp/tool /tmp/t") == b"bt\n"


def test_list_names_what_is_in_a_folder(bench, fresh):
    bench.shell(fresh, "mkdir -p d/e d/__pycache__; ln -s / d/root; mkfifo d/pipe")
    assert bench.run(fresh.list("d")) == ("e/", "pipe", "root")
    assert bench.run(fresh.list()) == ("d/", "tests/", "wordkit/")
    with pytest.raises(SandboxNotFound):
        bench.run(fresh.list("nowhere"))


def test_list_of_a_folder_without_end_is_refused(bench, fresh):
    bench.shell(fresh, "mkdir many; cd many; seq 20001 | xargs touch")
    with pytest.raises(OutputLimit):
        bench.run(fresh.list("many"))


def test_diff_names_exactly_what_differs(bench, fresh):
    assert bench.run(fresh.diff()) == {}
    bench.shell(
        fresh, "echo x > new.txt; rm -r tests; mkdir tests; echo 1 > tests/test_counting.py"
    )
    bench.shell(fresh, "touch wordkit/counting.py; chmod +x wordkit/shaping.py; ln -s / link")
    changes = bench.run(fresh.diff())
    assert changes.pop("new.txt") == b"x\n"
    assert changes.pop("tests/test_counting.py") == b"1\n"
    assert changes == {"tests/__init__.py": None, "tests/test_shaping.py": None}


def test_spec_files_lie_over_the_repository_and_are_differences(bench):
    sandbox = bench.create({"wordkit/shaping.py": None, "wordkit/counting.py": b"broken\n"})
    assert bench.shell(sandbox, "cat wordkit/counting.py; ls wordkit") == (
        b"broken\n__init__.py\ncounting.py\n"
    )
    assert bench.run(sandbox.diff()) == {
        "wordkit/shaping.py": None,
        "wordkit/counting.py": b"broken\n",
    }
    (child,) = bench.run(bench.backend.fork(sandbox))
    assert bench.run(child.diff()) == bench.run(sandbox.diff())
    for ended in (child, sandbox):
        bench.run(ended.close())


def test_times_do_not_tell_which_file_a_spec_changed(bench):
    pristine, broken = bench.create(), bench.create({"wordkit/counting.py": b"broken\n", "-x": b""})
    listing = "stat -c '%Y %n' wordkit wordkit/*"
    assert bench.shell(broken, listing) == bench.shell(pristine, listing)
    for ended in (pristine, broken):
        bench.run(ended.close())


def test_snapshot_restores_files_removals_links_and_modes(bench, fresh):
    bench.shell(
        fresh,
        "rm wordkit/shaping.py; rm -r tests; mkdir tests; echo only > tests/one; ln -s one tests/l;"
        "echo x > run; chmod 755 run; mkdir -m 700 empty",
    )
    before = bench.run(fresh.diff())
    snapshot = bench.run(fresh.snapshot())
    bench.shell(fresh, "rm -r tests; echo later > run")
    (child,) = bench.run(bench.backend.fork(snapshot))
    seen = bench.shell(
        child,
        "ls wordkit tests; readlink tests/l; stat -c '%a' run empty",
    )
    assert seen == b"tests:\nl\none\n\nwordkit:\n__init__.py\ncounting.py\none\n755\n700\n"
    assert bench.run(child.diff()) == before
    assert bench.run(child.diff(snapshot)) == {}
    assert bench.run(fresh.diff(snapshot)) == {"run": b"later\n", "tests/one": None}
    assert before["tests/one"] == b"only\n"
    bench.run(child.close())
    bench.run(bench.backend.remove_snapshot(snapshot))


def test_equal_content_gives_an_equal_snapshot(bench):
    first, second = bench.create(), bench.create()
    for sandbox in (first, second):
        bench.shell(sandbox, "echo same > file")
    one, two = bench.run(first.snapshot()), bench.run(second.snapshot())
    bench.shell(second, "echo other > file")
    three = bench.run(second.snapshot())
    assert one.snapshot_id == two.snapshot_id != three.snapshot_id
    for sandbox in (first, second):
        bench.run(sandbox.close())


def test_forks_share_the_past_and_nothing_after(bench, fresh):
    bench.shell(fresh, "echo past > file")
    forks = bench.run(bench.backend.fork(fresh, 3))
    for number, fork in enumerate(forks):
        bench.shell(fork, f"echo {number} >> file")
    assert [bench.shell(fork, "cat file") for fork in forks] == [
        b"past\n%d\n" % number for number in range(3)
    ]
    assert bench.shell(fresh, "cat file") == b"past\n"
    for fork in forks:
        bench.run(fork.close())


def test_chain_of_forks_keeps_every_step(bench):
    sandbox = bench.create()
    for step in range(4):
        bench.shell(sandbox, f"echo {step} > step{step}; rm -f step{step - 2}")
        (child,) = bench.run(bench.backend.fork(sandbox))
        bench.run(sandbox.close())
        sandbox = child
    assert bench.shell(sandbox, "ls step*; cat step3") == b"step2\nstep3\n3\n"
    bench.run(sandbox.close())


def test_removed_snapshot_is_gone_and_its_boxes_go_on(bench, fresh):
    bench.shell(fresh, "echo kept > file")
    snapshot = bench.run(fresh.snapshot())
    (child,) = bench.run(bench.backend.fork(snapshot))
    bench.run(bench.backend.remove_snapshot(snapshot))
    for use in (bench.backend.remove_snapshot, bench.backend.fork):
        with pytest.raises(SandboxNotFound):
            bench.run(use(snapshot))
    assert bench.shell(child, "cat file") == b"kept\n"
    bench.run(child.close())


def test_snapshot_while_a_command_writes_is_whole_and_the_command_goes_on(bench, fresh):
    write = "echo 0 > a; echo 0 > b; n=0; while :; do n=$((n+1)); echo $n > a; echo $n > b; done"

    async def use():
        writing = asyncio.create_task(fresh.exec(write, 10 * COMMAND_SECONDS))
        while not {"a", "b"} <= set(await fresh.list(".")):
            await asyncio.sleep(0.01)
        snapshot = await fresh.snapshot()
        before = await fresh.read("a")
        (child,) = await bench.backend.fork(snapshot)
        pair = [await child.read("a"), await child.read("b")]
        await child.close()
        while await fresh.read("a") == before:
            await asyncio.sleep(0.01)
        await fresh.exec("kill -9 -1", COMMAND_SECONDS)
        await writing
        return pair

    first, second = [int(text or b"0") for text in bench.run(use())]
    assert first - second in (0, 1) or 0 in (first, second)


def test_memory_snapshot_is_refused_where_it_is_not_declared(bench, fresh):
    if bench.backend.keeps_memory:
        assert bench.run(fresh.snapshot(SnapshotKind.MEMORY)).kind is SnapshotKind.MEMORY
        return
    with pytest.raises(InvalidArgument, match="kind memory"):
        bench.run(fresh.snapshot(SnapshotKind.MEMORY))


def test_closed_sandbox_is_lost(bench):
    sandbox = bench.create()
    bench.run(sandbox.close())
    bench.run(sandbox.close())
    with pytest.raises(SandboxLost):
        bench.run(sandbox.read("wordkit/counting.py"))

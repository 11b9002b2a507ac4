from ostinato.infra.sandbox import RepositoryEnvironment


def test_visible_tests_run_on_what_the_box_holds(runner, wordkit):
    async def repair():
        environment = RepositoryEnvironment.create(wordkit, boxes=1)
        try:
            text = wordkit.files["wordkit/counting.py"]
            box = await environment.lease(
                {"wordkit/counting.py": text.replace(b"total += 1", b"total += 2")}
            )
            tests = ("tests/test_counting.py::test_count_words",)
            before = await environment.run_visible_tests(box, tests)
            await box.exec("sed -i 's/total += 2/total += 1/' wordkit/counting.py", 5)
            after = await environment.run_visible_tests(box, tests)
            await environment.release(box)
            return before, after
        finally:
            await environment.close()

    before, after = runner.run(repair())
    assert before.first_failure.error_type == "AssertionError"
    assert after.passed

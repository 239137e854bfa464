"""Reads what Vellum writes, by the programs that others read it with, and says what they found as one line of JSON.

usage: readers.py FORM FILE, where FORM is kunit, tap, junit, kcidb or lava. KUNIT and LAVA name the directories of the two that no
package registry has.
"""

import io
import json
import os
import sys


def kunit(path):
    """The parser of the kernel's tools/testing/kunit: every level."""
    import inspect
    sys.path.insert(0, os.environ["KUNIT"])
    import kunit_parser

    with open(path) as file:
        arguments = [kunit_parser.extract_tap_lines(file.read().splitlines())]
    if len(inspect.signature(kunit_parser.parse_run_tests).parameters) > 1:
        import kunit_printer
        arguments.append(kunit_printer.Printer(io.StringIO()))
    test = kunit_parser.parse_run_tests(*arguments)

    def leaves(test, path):
        if not test.subtests:
            yield "/".join(path + [test.name]), test.status.name
        for below in test.subtests:
            yield from leaves(below, path + ([test.name] if test.name != "main" else []))

    return {"errors": test.counts.errors, "crashed": test.counts.crashed, "cases": dict(leaves(test, []))}


def tap(path):
    """tap.py, which knows the top level alone."""
    from tap.parser import Parser

    lines = list(Parser().parse_file(path))
    tests = [[line.description, line.ok, line.skip] for line in lines if line.category == "test"]
    return {"plan": [line.expected_tests for line in lines if line.category == "plan"], "tests": tests}


def junit(path):
    from junitparser import JUnitXml

    found = {}
    for suite in JUnitXml.fromfile(path):
        for case in suite:
            ends = [[type(end).__name__, end.type, end.message] for end in case.result]
            found[f"{suite.name}: {case.name}"] = ends
    return found


def kcidb(path):
    from kcidb_io.schema import LATEST

    with open(path) as file:
        submission = json.load(file)
    LATEST.validate(submission)
    builds = {build["id"]: build["checkout_id"] for build in submission["builds"]}
    checkouts = {checkout["id"] for checkout in submission["checkouts"]}
    assert set(builds.values()) <= checkouts, "a build of no checkout"
    assert all(test["build_id"] in builds for test in submission["tests"]), "a test of no build"
    ids = [test["id"] for test in submission["tests"]]
    assert len(ids) == len(set(ids)), "two tests have one id"
    return {test["path"]: [test["status"], test.get("number")] for test in submission["tests"]}


def lava(path):
    """lava-common's schema of a job."""
    import yaml
    sys.path.insert(0, os.environ["LAVA"])
    from lava_common.schemas import validate

    with open(path) as file:
        job = yaml.safe_load(file)
    validate(job, strict=True)
    job["actions"][0]["deploy"]["planted"] = 1
    try:
        validate(job, strict=True)
    except Exception as error:
        return {"planted": str(error)}
    raise AssertionError("the schema takes anything")


said, sys.stdout = sys.stdout, io.StringIO()
found = {"kunit": kunit, "tap": tap, "junit": junit, "kcidb": kcidb, "lava": lava}[sys.argv[1]](sys.argv[2])
print(json.dumps(found), file=said)

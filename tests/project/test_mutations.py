"""The faults of ``support/faults.txt`` are still faults of the package."""

from tests.support.mutations import PACKAGE, arguments_for, faults


def test_every_fault_applies_and_its_tests_exist():
    table = list(faults())
    assert len({fault.name for fault in table}) == len(table) >= 100
    for fault in table:
        text = (PACKAGE / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.old) == 1 and fault.new != fault.old, f"{fault.file}: {fault.name}"
        compile(text.replace(fault.old, fault.new), fault.file, "exec")
        for path in arguments_for(fault, ()):
            assert not path.startswith("tests/") or (PACKAGE.parent / path).exists(), path

"""nvml.read through the real nvidia-ml-py, against a libnvidia-ml.so.1 that is compiled here."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.host.facts import Gpu, GpuClocks, GpuProcess, MigDevice, Nvml

HERE = Path(__file__).parent
READ = """
import sys
from pathlib import Path
from launcher.host import nvml
dirs = [Path(one) for one in sys.argv[2:]]
print(nvml.read(driver_dirs=dirs, proc_gpus=Path(sys.argv[1])).model_dump_json())
"""

CLOCKS = """
import json
from launcher.host import nvml
print(json.dumps([one.model_dump() for one in nvml.clocks()]))
"""

Reader = Callable[..., Nvml]


@pytest.fixture(scope="session")
def library_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make the NVML stand-in with")
    folder = tmp_path_factory.mktemp("nvml")
    flags = ["-shared", "-fPIC", "-Wall", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([compiler, *flags, "-o", folder / "libnvidia-ml.so.1", HERE / "fake_nvml.c"], check=True)
    return folder


@pytest.fixture
def read(library_dir: Path, tmp_path: Path) -> Reader:
    def reader(machine: str, *driver_dirs: Path, on_loader_path: bool = True, proc_gpus: Path = tmp_path) -> Nvml:
        env = {**os.environ, "FAKE_NVML": machine}
        env.pop("LD_LIBRARY_PATH", None)
        if on_loader_path:
            env["LD_LIBRARY_PATH"] = str(library_dir)
        command = [sys.executable, "-W", "error", "-c", READ, str(proc_gpus), *map(str, driver_dirs)]
        result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return Nvml.model_validate(json.loads(result.stdout))

    return reader


def test_one_card_is_read_with_everything_that_it_offers(read: Reader) -> None:
    found = read("one_card")
    assert (found.error, found.driver, found.cuda_driver, found.p2p) == (None, "610.43.02", "13.3", {})
    assert found.gpus == (
        Gpu(
            index=0,
            uuid="GPU-00000000-0000-4000-8000-000000000001",
            name="NVIDIA GeForce RTX 3090",
            pci_bus_id="00000000:04:00.0",
            compute_capability=(8, 6),
            total_mib=24576,
            free_mib=22589,
            display_active=True,
            mig_mode=None,
            utilization_percent=7,
            ecc_errors_uncorrected=None,
            processes=(
                GpuProcess(pid=2411, name="/usr/bin/gnome-shell", used_mib=1331),
                GpuProcess(pid=300, name=None, used_mib=512),
                GpuProcess(pid=200, name=None, used_mib=None),
            ),
        ),
    )


@pytest.mark.parametrize(("machine", "status"), [("two_cards", "NS"), ("two_cards_with_p2p", "OK")])
def test_a_pair_is_read_with_its_peer_access(read: Reader, machine: str, status: str) -> None:
    found = read(machine)
    assert [gpu.uuid for gpu in found.gpus] == [f"GPU-00000000-0000-4000-8000-00000000000{n}" for n in (1, 2)]
    assert found.p2p == {"0-1": status}


def test_a_card_without_a_handle_is_an_error_of_its_own_with_the_kernels_address(read: Reader, tmp_path: Path) -> None:
    for name in ("0000:09:00.0", "0000:01:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    found = read("unreachable_card", proc_gpus=tmp_path / "gpus")
    assert found.error is None
    assert found.gpus[0].error is None
    assert found.gpus[1] == Gpu(index=1, pci_bus_id="00000000:09:00.0", error="GPU is lost")
    assert found.p2p == {}


def test_the_kernels_addresses_are_not_used_where_they_are_not_one_per_card(read: Reader, tmp_path: Path) -> None:
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    assert read("unreachable_card", proc_gpus=tmp_path / "gpus").gpus[1].pci_bus_id is None


def test_a_card_lost_after_its_handle_keeps_its_address(read: Reader) -> None:
    assert read("lost_card").gpus[1] == Gpu(index=1, pci_bus_id="00000000:09:00.0", error="GPU is lost")


def test_mig_slices_are_read_with_their_own_memory(read: Reader) -> None:
    (gpu,) = read("mig").gpus
    assert gpu.mig_mode is True
    assert gpu.mig_devices == (
        MigDevice(uuid="MIG-00000000-0000-4000-8000-00000000c0de", profile="2g.20gb", total_mib=20096, free_mib=20080),
        MigDevice(uuid="MIG-00000000-0000-4000-8000-00000000c0df", profile="1g.10gb", total_mib=9984, free_mib=9970),
    )
    assert gpu.ecc_errors_uncorrected == 3
    assert gpu.utilization_percent is None


def test_memory_that_is_not_supported_is_unknown(read: Reader) -> None:
    (gpu,) = read("shared_memory").gpus
    assert (gpu.total_mib, gpu.free_mib, gpu.error) == (None, None, None)
    assert gpu.compute_capability == (12, 1)


def test_a_driver_without_cards_is_no_error(read: Reader) -> None:
    assert read("no_cards") == Nvml(driver="580.126.09", cuda_driver="13.0")


@pytest.mark.parametrize(
    ("machine", "error"),
    [("no_driver", "Driver Not Loaded"), ("version_mismatch", "RM has detected an NVML/RM version mismatch.")],
)
def test_a_driver_that_does_not_answer_is_an_error_in_the_facts(read: Reader, machine: str, error: str) -> None:
    assert read(machine) == Nvml(error=error)


def test_a_missing_library_is_an_error_in_the_facts(read: Reader) -> None:
    assert read("one_card", on_loader_path=False) == Nvml(error="NVML Shared Library Not Found")


def test_a_library_outside_the_loaders_path_is_found_in_the_drivers_folder(read: Reader, library_dir: Path) -> None:
    assert len(read("two_cards", library_dir, on_loader_path=False).gpus) == 2


def test_a_library_that_does_not_load_is_an_error_in_the_facts(read: Reader, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library", encoding="utf-8")
    assert read("one_card", tmp_path, on_loader_path=False).error == "NVML Shared Library Not Found"


@pytest.mark.parametrize(
    ("machine", "held_back_by"), [("mig", ("power limit", "heat (hardware)")), ("one_card", None), ("no_driver", ())]
)
def test_clocks_are_read_with_what_holds_them_back(
    library_dir: Path, machine: str, held_back_by: tuple[str, ...] | None
) -> None:
    env = {**os.environ, "FAKE_NVML": machine, "LD_LIBRARY_PATH": str(library_dir)}
    command = [sys.executable, "-W", "error", "-c", CLOCKS]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    found = [GpuClocks.model_validate(one) for one in json.loads(said)]
    if machine == "no_driver":
        assert found == []
        return
    assert (found[0].sm_mhz, found[0].max_sm_mhz, found[0].temperature_c) == (1410, 2100, 71)
    assert (found[0].power_w, found[0].power_limit_w) == (349.5, 350.0)
    assert found[0].held_back_by == held_back_by

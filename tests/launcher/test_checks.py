"""The check before a start: the hosts of tests/data/failures/hosts.yaml, the same with other numbers, and its rules."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checks import CheckResult, Demand, check, facts_from_file
from launcher.errors import UsageError
from launcher.host.facts import Docker, Gpu, GpuProcess, HostFacts, Listener, MigDevice, Nvml, Packages, Proc
from launcher.host.modelfiles import IncompleteFile

HOSTS_FILE = Path(__file__).parents[1] / "data" / "failures" / "hosts.yaml"
HOSTS: list[dict[str, Any]] = yaml.safe_load(HOSTS_FILE.read_text(encoding="utf-8"))["hosts"]
USABLE = 23.56 / 24

DOCKER = Docker(engine="29.5.2", api="1.54", compose="5.0.2", runtimes=("nvidia", "runc"), root_free_gib=310.0)
PROC = Proc(kernel="6.8.0-60-generic", mem_total_gib=62, mem_available_gib=50)
DEMAND = Demand(
    profile="rtx3090",
    gpu_memory_utilization=0.9,
    compute_capability=(8, 6),
    min_compute_capability=(8, 0),
    min_gpu_gib=23.0,
    image_cuda="13.0",
    min_driver="580",
    image_unpacked_gib=28.0,
    model_gib=17.69,
    port=8000,
)
CPU_DEMAND = Demand(profile="cpu", runtime="host", needs_gpu=False, model_gib=0.27, cpu_kv_cache_gib=1.0, port=8000)


def gpu(index: int = 0, **changes: Any) -> Gpu:
    values = {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "NVIDIA GeForce RTX 3090",
        "compute_capability": (8, 6),
        "total_mib": 24576,
        "free_mib": 24100,
    }
    return Gpu.model_validate({**values, **changes})


def host(*gpus: Gpu, **changes: Any) -> HostFacts:
    nvml = Nvml(driver="580.126.09", cuda_driver="13.0", gpus=gpus)
    return HostFacts(nvml=nvml, docker=DOCKER, proc=PROC).model_copy(update=changes)


def two(**changes: Any) -> Demand:
    return DEMAND.model_copy(update={"tensor_parallel_size": 2, **changes})


def causes(result: CheckResult) -> dict[str, str]:
    return {problem.cause: problem.severity for problem in result.problems}


def said(result: CheckResult) -> str:
    return " ".join(f"{problem.message} {problem.remedy}" for problem in result.problems)


def mentions(text: str, entry: str) -> bool:
    return any(part.strip().lower() in text.lower() for part in entry.split("|"))


def matches(result: CheckResult, expect: dict[str, Any]) -> None:
    found = set(causes(result))
    assert result.verdict == expect["verdict"]
    assert set(expect["causes"]) <= found <= {*expect["causes"], *expect["may_also"]}
    text = said(result)
    assert [entry for entry in expect["must_mention"] if not mentions(text, entry)] == []
    assert [entry for entry in expect.get("must_not_mention", ()) if mentions(text, entry)] == []
    assert result.selected == tuple(expect.get("selected_uuids", result.selected))
    assert result.gpu_mode == expect.get("gpu_mode", result.gpu_mode)


@pytest.mark.parametrize("case", HOSTS, ids=lambda case: case["id"])
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_the_host_gets_its_verdict(case: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"host.{suffix}"
    document = {"facts": case["facts"], "plan": case["plan"]}
    file.write_text(json.dumps(document) if suffix == "json" else yaml.safe_dump(document), encoding="utf-8")
    facts, demand = facts_from_file(file)
    assert demand is not None
    matches(check(facts, demand), case["expect"])


@pytest.mark.parametrize("case", HOSTS, ids=lambda case: case["id"])
def test_names_decide_nothing(case: dict[str, Any]) -> None:
    facts = HostFacts.model_validate(case["facts"])
    renamed = tuple(one.model_copy(update={"name": "NVIDIA GeForce RTX 4090 Laptop"}) for one in facts.nvml.gpus)
    nvml = facts.nvml.model_copy(update={"gpus": renamed})
    demand = Demand.model_validate({**case["plan"], "profile": "of-my-own"})
    result = check(facts.model_copy(update={"nvml": nvml}), demand)
    before = check(facts, demand)
    assert (result.verdict, causes(result), result.selected) == (before.verdict, causes(before), before.selected)


def test_a_machine_that_suits_is_ok() -> None:
    assert check(host(gpu()), DEMAND) == CheckResult(verdict="ok", problems=(), selected=("GPU-0",), gpu_mode="nvidia")


def test_all_problems_are_told_together() -> None:
    facts = host(
        gpu(free_mib=10_000),
        nvml=Nvml(driver="570.1", cuda_driver="12.8", gpus=(gpu(free_mib=10_000),)),
        docker=DOCKER.model_copy(update={"runtimes": ("runc",), "root_free_gib": 3.0}),
        ports={"8000": Listener(process="python3", pid=77)},
    )
    assert causes(check(facts, DEMAND)) == dict.fromkeys(
        ("driver-too-old", "gpu-memory-busy", "nvidia-runtime-missing", "disk-space-low", "port-in-use"), "refuse"
    )


class TestMemory:
    @settings(deadline=None)  # a busy machine is no failure
    @given(free_mib=st.integers(0, 24576), utilization=st.floats(0.3, 0.98))
    def test_vllms_rule_decides(self, free_mib: int, utilization: float) -> None:
        demand = DEMAND.model_copy(update={"gpu_memory_utilization": utilization})
        found = causes(check(host(gpu(free_mib=free_mib)), demand))
        margin_mib = free_mib - 24576 * USABLE * utilization
        expected = "gpu-memory-busy" if margin_mib < 0 else "gpu-memory-tight" if margin_mib < 512 else None
        assert found == ({} if expected is None else {expected: "refuse" if margin_mib < 0 else "warn"})

    def test_every_holder_is_named_and_the_largest_is_to_be_ended(self) -> None:
        holders = (GpuProcess(pid=7, name="game", used_mib=4096), GpuProcess(pid=8, used_mib=100), GpuProcess(pid=9))
        (problem,) = check(host(gpu(free_mib=20_000, processes=holders)), DEMAND).problems
        for part in ("game (pid 7, 4.00 GiB)", "process (pid 8, 0.10 GiB)", "process (pid 9)"):
            assert part in problem.message
        assert problem.remedy.startswith("End game (pid 7)")

    def test_the_utilization_that_is_offered_passes(self) -> None:
        facts = host(gpu(free_mib=20_000))
        (problem,) = check(facts, DEMAND).problems
        offered = float(problem.remedy.rstrip(".").rsplit(" ", 1)[1])
        assert check(facts, DEMAND.model_copy(update={"gpu_memory_utilization": offered})).verdict == "ok"

    def test_no_utilization_is_offered_where_next_to_nothing_is_free(self) -> None:
        (problem,) = check(host(gpu(free_mib=2_000)), DEMAND).problems
        assert problem.remedy.endswith("lower serve.gpu_memory_utilization.")

    def test_a_card_that_is_too_small_is_not_called_busy_too(self) -> None:
        small = gpu(total_mib=12288, free_mib=1000)
        assert causes(check(host(small), DEMAND)) == {"gpu-memory-too-small": "refuse"}

    def test_unknown_memory_is_told_and_does_not_refuse(self) -> None:
        result = check(host(gpu(total_mib=None, free_mib=None)), DEMAND)
        assert causes(result) == {"gpu-memory-unknown": "warn"}

    @settings(deadline=None)  # a busy machine is no failure
    @given(free_mib=st.integers(0, 24000), more_mib=st.integers(0, 576))
    def test_more_free_memory_never_makes_it_worse(self, free_mib: int, more_mib: int) -> None:
        order = ("ok", "warn", "refuse")
        less = check(host(gpu(free_mib=free_mib)), DEMAND)
        more = check(host(gpu(free_mib=free_mib + more_mib)), DEMAND)
        assert order.index(more.verdict) <= order.index(less.verdict)


class TestSelection:
    def test_the_profiles_kind_goes_before_a_newer_card(self) -> None:
        newer = gpu(1, compute_capability=(8, 9), total_mib=24564)
        result = check(host(gpu(), newer), DEMAND)
        assert result.selected == ("GPU-0",)
        assert causes(result) == {"mixed-gpus": "warn"}

    def test_a_free_card_goes_before_a_busy_one(self) -> None:
        assert check(host(gpu(free_mib=9_000), gpu(1)), DEMAND).selected == ("GPU-1",)

    def test_alike_cards_go_before_better_and_mixed_ones(self) -> None:
        demand = two(compute_capability=None)
        odd = gpu(0, compute_capability=(8, 9), total_mib=24564)
        assert check(host(odd, gpu(1), gpu(2)), demand).selected == ("GPU-1", "GPU-2")

    def test_mixed_cards_are_taken_where_there_are_no_others(self) -> None:
        odd = gpu(0, compute_capability=(8, 9))
        result = check(host(odd, gpu(1)), two(compute_capability=None))
        assert result.selected == ("GPU-0", "GPU-1")
        assert causes(result) == {"mixed-gpus": "warn"}

    def test_cards_are_named_by_index_or_uuid_and_keep_their_order(self) -> None:
        result = check(host(gpu(), gpu(1), gpu(2)), two(gpus_asked=("GPU-2", 0)))
        assert (result.verdict, result.selected) == ("ok", ("GPU-2", "GPU-0"))

    def test_a_card_that_is_not_there_is_named_with_those_that_are(self) -> None:
        (problem,) = check(host(gpu()), DEMAND.model_copy(update={"gpus_asked": (3,)})).problems
        assert (problem.cause, problem.severity) == ("gpu-not-visible", "refuse")
        assert "0 = GPU-0" in problem.message

    @pytest.mark.parametrize("asked", [(0,), (0, 1, 2)])
    def test_another_number_of_named_cards_is_refused(self, asked: tuple[int, ...]) -> None:
        assert causes(check(host(gpu(), gpu(1), gpu(2)), two(gpus_asked=asked))) == {"gpu-too-few": "refuse"}

    def test_too_few_cards_are_refused(self) -> None:
        result = check(host(gpu()), two())
        assert causes(result) == {"gpu-too-few": "refuse"}
        assert "needs 2" in said(result)

    @settings(deadline=None)  # a busy machine is no failure
    @given(st.permutations(range(4)), st.integers(1, 3))
    def test_the_numbering_of_the_cards_decides_nothing(self, order: list[int], count: int) -> None:
        cards = [gpu(n, uuid=f"GPU-{'abcd'[n]}", free_mib=23_000 + 100 * n) for n in range(4)]
        moved = [card.model_copy(update={"index": n}) for n, card in enumerate(cards[i] for i in order)]
        demand = DEMAND.model_copy(update={"tensor_parallel_size": count})
        assert set(check(host(*moved), demand).selected) == {f"GPU-{name}" for name in "dcb"[:count]}


class TestCards:
    @pytest.mark.parametrize(("own", "severity"), [((8, 9), "warn"), ((12, 0), "warn"), ((8, 0), "refuse")])
    def test_a_card_of_another_kind_is_told(self, own: tuple[int, int], severity: str) -> None:
        assert causes(check(host(gpu(compute_capability=own)), DEMAND)) == {"wrong-gpu-selected": severity}

    def test_a_card_below_the_models_kernels_is_refused(self) -> None:
        result = check(host(gpu(compute_capability=(7, 5))), DEMAND)
        assert causes(result) == {"compute-capability-too-low": "refuse"}
        assert mentions(said(result), "7.5")

    def test_a_lost_card_that_is_not_needed_is_told(self) -> None:
        lost = Gpu(index=1, pci_bus_id="00000000:09:00.0", error="GPU is lost")
        assert causes(check(host(gpu(), lost), DEMAND)) == {"gpu-lost": "warn"}
        assert causes(check(host(gpu(), lost), two())) == {"gpu-lost": "refuse"}
        for asked, severity in ((0, "warn"), (1, "refuse")):
            demand = DEMAND.model_copy(update={"gpus_asked": (asked,)})
            assert causes(check(host(gpu(), lost), demand)) == {"gpu-lost": severity}

    def test_a_mig_slice_counts_by_itself(self) -> None:
        slices = (
            MigDevice(uuid="MIG-a", profile="1g.10gb", total_mib=9984, free_mib=9970),
            MigDevice(uuid="MIG-b", profile="3g.40gb", total_mib=40448, free_mib=40400),
        )
        parent = gpu(total_mib=81559, free_mib=81000, mig_mode=True, mig_devices=slices)
        result = check(host(parent), DEMAND)
        assert (result.verdict, result.selected) == ("warn", ("MIG-b",))
        assert set(causes(result)) == {"mixed-gpus"}
        assert causes(check(host(parent), two(min_gpu_gib=9.0, gpu_memory_utilization=0.5)))["mig-device"] == "refuse"

    def test_mig_mode_without_an_instance_is_refused(self) -> None:
        assert causes(check(host(gpu(mig_mode=True)), DEMAND)) == {"mig-device": "refuse"}

    def test_uncorrected_memory_errors_are_told_for_the_card_in_use(self) -> None:
        facts = host(gpu(ecc_errors_uncorrected=2), gpu(1, ecc_errors_uncorrected=0))
        asked = DEMAND.model_copy(update={"gpus_asked": (0,)})
        assert causes(check(facts, asked)) == {"gpu-ecc-errors": "warn"}
        assert causes(check(facts, asked.model_copy(update={"gpus_asked": (1,)}))) == {}

    @pytest.mark.parametrize(
        ("p2p", "is_told"), [({}, False), ({"0-1": "OK"}, False), ({"0-1": "U"}, False), ({"0-1": "CNS"}, True)]
    )
    def test_a_pair_without_peer_access_is_told(self, p2p: dict[str, str], is_told: bool) -> None:
        nvml = Nvml(driver="580.1", cuda_driver="13.0", p2p=p2p, gpus=(gpu(), gpu(1)))
        assert ("no-p2p" in causes(check(host(nvml=nvml), two()))) is is_told


class TestDriver:
    @pytest.mark.parametrize(
        ("driver", "cuda", "is_refused"),
        [
            ("580.65.06", "13.0", False),
            ("1000.1", "14.0", False),
            ("579.99", "13.0", True),
            ("99.1", "13.0", True),
            (None, "13.0", False),
            (None, "12.9", True),
            (None, None, False),
        ],
    )
    def test_the_driver_runs_the_images_cuda(self, driver: str | None, cuda: str | None, is_refused: bool) -> None:
        result = check(host(nvml=Nvml(driver=driver, cuda_driver=cuda, gpus=(gpu(),))), DEMAND)
        assert causes(result) == ({"driver-too-old": "refuse"} if is_refused else {})

    def test_a_newer_minor_cuda_in_the_image_is_no_problem(self) -> None:
        assert check(host(gpu()), DEMAND.model_copy(update={"image_cuda": "13.2"})).verdict == "ok"

    @pytest.mark.parametrize(
        ("error", "kernel", "cause"),
        [
            ("RM has detected an NVML/RM version mismatch.", "6.8.0", "driver-library-mismatch"),
            ("Driver Not Loaded", "6.8.0", "nvidia-driver-missing"),
            ("Driver Not Loaded", "6.6.87.2-microsoft-standard-WSL2", "wsl-gpu-missing"),
            ("Insufficient Permissions", "6.8.0", "nvidia-driver-missing"),
        ],
    )
    def test_nvml_that_does_not_answer_has_one_cause(self, error: str, kernel: str, cause: str) -> None:
        facts = host(nvml=Nvml(error=error), proc=PROC.model_copy(update={"kernel": kernel}))
        assert causes(check(facts, DEMAND)) == {cause: "refuse"}


class TestDocker:
    def test_cdi_alone_is_enough_with_the_cards_uuids(self) -> None:
        docker = DOCKER.model_copy(
            update={"runtimes": ("runc",), "cdi_spec_dirs": ("/etc/cdi",), "cdi_devices": ("nvidia.com/gpu=GPU-0",)}
        )
        result = check(host(gpu(), docker=docker), DEMAND)
        assert (result.verdict, result.gpu_mode) == ("ok", "cdi")
        other = check(host(gpu(uuid="GPU-9"), docker=docker), DEMAND)
        assert causes(other) == {"cdi-device-missing": "refuse"}
        assert mentions(said(other), "nvidia-ctk cdi generate")
        old = docker.model_copy(update={"engine": "24.0.7", "api": "1.43"})
        assert causes(check(host(gpu(), docker=old), DEMAND)) == {"docker-too-old": "refuse"}

    def test_the_nvidia_runtime_goes_before_cdi(self) -> None:
        docker = DOCKER.model_copy(update={"cdi_spec_dirs": ("/etc/cdi",), "cdi_devices": ("nvidia.com/gpu=all",)})
        result = check(host(gpu(), docker=docker), DEMAND)
        assert (result.verdict, result.gpu_mode) == ("ok", "nvidia")

    def test_the_toolkits_hook_does_without_the_runtime(self) -> None:
        docker = DOCKER.model_copy(update={"runtimes": ("runc",), "nvidia_hook": True})
        assert check(host(gpu(), docker=docker), DEMAND).verdict == "ok"

    def test_podman_takes_cdi(self) -> None:
        docker = DOCKER.model_copy(update={"flavor": "podman", "api": "1.41", "runtimes": ("crun",)})
        result = check(host(gpu(), docker=docker), DEMAND)
        assert (causes(result), result.gpu_mode) == ({"cdi-device-missing": "refuse"}, "cdi")

    @pytest.mark.parametrize(
        ("changes", "cause"),
        [
            ({"error": "no Docker Engine runs here"}, "docker-missing"),
            ({"compose": None, "compose_error": "not installed"}, "compose-missing"),
            ({"engine": "19.03.15", "api": "1.40"}, "docker-too-old"),
            ({"compose": "1.29.2"}, "docker-too-old"),
        ],
    )
    def test_what_the_container_needs_is_asked(self, changes: dict[str, Any], cause: str) -> None:
        docker = DOCKER.model_copy(update=changes)
        assert causes(check(host(gpu(), docker=docker), DEMAND)) == {cause: "refuse"}

    def test_a_denied_socket_has_another_remedy(self) -> None:
        docker = Docker(error="permission denied on /var/run/docker.sock")
        assert mentions(said(check(host(gpu(), docker=docker), DEMAND)), "usermod -aG docker")

    def test_an_unknown_engine_is_not_called_missing(self) -> None:
        assert check(host(gpu(), docker=Docker()), DEMAND).verdict == "ok"

    def test_the_host_runtime_needs_no_docker(self) -> None:
        demand = DEMAND.model_copy(update={"runtime": "host"})
        result = check(host(gpu(), docker=Docker(error="none")), demand)
        assert (result.verdict, result.gpu_mode) == ("ok", "none")


class TestMachine:
    def test_the_cpu_engine_needs_neither_gpu_nor_docker(self) -> None:
        facts = host(nvml=Nvml(error="NVML Shared Library Not Found"), docker=Docker(error="none"))
        assert check(facts, CPU_DEMAND) == CheckResult(verdict="ok", problems=(), selected=(), gpu_mode="none")

    @pytest.mark.parametrize(
        ("packages", "line"),
        [
            (Packages(libnuma=False, cxx_compiler=False), "sudo apt-get install libnuma1 g++"),
            (Packages(libnuma=True, cxx_compiler=False), "sudo apt-get install g++"),
            (Packages(libnuma=False, cxx_compiler=None), "sudo apt-get install libnuma1"),
            (Packages(python="3.13", python_headers=False), "sudo apt-get install python3.13-dev"),
            (Packages(cxx_compiler=False, python_headers=False), "sudo apt-get install g++ python3-dev"),
        ],
    )
    def test_missing_packages_are_one_problem_with_one_line(self, packages: Packages, line: str) -> None:
        (problem,) = check(host(packages=packages), CPU_DEMAND).problems
        assert (problem.cause, problem.severity, problem.remedy) == ("system-package-missing", "refuse", line)

    @pytest.mark.parametrize("demand", [DEMAND, CPU_DEMAND.model_copy(update={"runtime": "docker"})])
    def test_a_container_brings_its_own_packages(self, demand: Demand) -> None:
        assert check(host(gpu(), packages=Packages(libnuma=False, cxx_compiler=False)), demand).verdict == "ok"

    @pytest.mark.parametrize(
        ("listener", "by"),
        [
            (Listener(process="python3", pid=77), "python3 (pid 77)"),
            (Listener(process="docker-proxy", pid=5, container="open-webui"), "container open-webui"),
            (Listener(), "a process of another user"),
        ],
    )
    def test_a_taken_port_is_refused_with_its_holder(self, listener: Listener, by: str) -> None:
        (problem,) = check(host(gpu(), ports={"8000": listener}), DEMAND).problems
        assert problem.cause == "port-in-use"
        assert problem.message == f"port 8000 is taken by {by}."

    def test_another_port_in_use_is_no_problem(self) -> None:
        assert check(host(gpu(), ports={"8001": Listener()}), DEMAND).verdict == "ok"

    @pytest.mark.parametrize(
        ("root_gib", "models_gib", "shared", "places"),
        [
            (27.0, 400.0, False, 1),
            (310.0, 17.0, False, 1),
            (27.0, 17.0, False, 2),
            (45.0, 45.0, False, 0),
            (45.0, 45.0, True, 1),
            (46.0, 46.0, True, 0),
            (None, None, None, 0),
        ],
    )
    def test_image_and_model_need_their_disks(
        self, root_gib: float | None, models_gib: float | None, shared: bool | None, places: int
    ) -> None:
        facts = host(gpu(), docker=DOCKER.model_copy(update={"root_free_gib": root_gib}))
        disk = facts.disk.model_copy(update={"models_free_gib": models_gib, "models_share_docker_disk": shared})
        result = check(facts.model_copy(update={"disk": disk}), DEMAND)
        assert [problem.cause for problem in result.problems] == ["disk-space-low"] * places

    def test_what_is_here_needs_no_disk(self) -> None:
        facts = host(gpu(), docker=DOCKER.model_copy(update={"root_free_gib": 0.5}))
        facts = facts.model_copy(update={"disk": facts.disk.model_copy(update={"models_free_gib": 0.5})})
        here = DEMAND.model_copy(update={"image_is_here": True, "model_is_here": True})
        assert check(facts, here).verdict == "ok"

    @pytest.mark.parametrize(
        ("kernel", "total_gib", "count", "is_told"),
        [
            ("6.6.87.2-microsoft-standard-WSL2", 35.0, 2, True),
            ("6.6.87.2-microsoft-standard-WSL2", 36.0, 2, False),
            ("6.6.87.2-microsoft-standard-WSL2", 25.0, 1, False),
            ("6.8.0-60-generic", 25.0, 2, False),
            ("6.8.0-60-generic", 16.0, 2, True),
            ("6.8.0-60-generic", None, 2, False),
        ],
    )
    def test_host_memory_that_the_load_needs_is_told(
        self, kernel: str, total_gib: float | None, count: int, is_told: bool
    ) -> None:
        facts = host(gpu(), gpu(1), proc=Proc(kernel=kernel, mem_total_gib=total_gib))
        result = check(facts, DEMAND.model_copy(update={"tensor_parallel_size": count}))
        assert causes(result) == ({"host-memory-low": "warn"} if is_told else {})
        assert mentions(said(result), ".wslconfig") is (is_told and "WSL" in kernel)

    @pytest.mark.parametrize(
        ("available_gib", "found"),
        [
            (1.2, {"host-memory-low": "refuse"}),
            (1.3, {"host-memory-low": "warn"}),
            (3.1, {"host-memory-low": "warn"}),
            (3.2, {}),
            (None, {}),
        ],
    )
    def test_a_cpu_engine_holds_model_and_cache_in_memory(
        self, available_gib: float | None, found: dict[str, str]
    ) -> None:
        facts = host(proc=Proc(mem_total_gib=64, mem_available_gib=available_gib))
        assert causes(check(facts, CPU_DEMAND)) == found

    def test_incomplete_files_are_named_up_to_five(self) -> None:
        files = tuple(IncompleteFile(path=f"shard-{n}", reason="missing") for n in range(7))
        (problem,) = check(host(gpu()), DEMAND.model_copy(update={"incomplete_files": files})).problems
        assert problem.cause == "model-files-incomplete"
        assert "shard-4: missing; and 2 more" in problem.message


class TestFactsFile:
    def written(self, path: Path, text: str) -> Path:
        path.write_text(text, encoding="utf-8")
        return path

    def test_bare_facts_have_no_demand(self, tmp_path: Path) -> None:
        facts, demand = facts_from_file(self.written(tmp_path / "f.yaml", "docker: {engine: 29.5.2}"))
        assert (facts, demand) == (HostFacts(docker=Docker(engine="29.5.2")), None)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("nvml: {gpu: []}", "nvml.gpu: no such key; remove it"),
            ("nvlm: {}", "nvlm: no such key; there are nvml, docker, proc"),
            ("{facts: {nvml: {gpus: [{uuid: x}]}}}", "facts.nvml.gpus.0.index: missing; add it"),
            ("{facts: {}, plan: {profile: x, port: 0}}", "plan.port: got 0; input should be greater"),
            ("{facts: {}, plan: {profile: x, min_driver: new}}", "plan.min_driver: got 'new'"),
            ("{facts: {}, demand: {}}", "demand: no such key; there are facts and plan"),
            ("[1]", "a mapping is needed, got list"),
            ("{", "neither JSON nor YAML"),
            ("", "a mapping is needed, got NoneType"),
            ("facts: 3", "facts: got 3; a mapping is needed"),
        ],
    )
    def test_a_wrong_file_is_told_by_key(self, tmp_path: Path, text: str, message: str) -> None:
        path = self.written(tmp_path / "f.yaml", text)
        with pytest.raises(UsageError) as caught:
            facts_from_file(path)
        assert str(path) in str(caught.value)
        assert message in str(caught.value)

    def test_a_missing_file_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="No such file"):
            facts_from_file(tmp_path / "absent.json")


mib = st.none() | st.integers(0, 100_000)
capabilities = st.none() | st.tuples(st.integers(5, 13), st.integers(0, 9))
gpus = st.lists(
    st.fixed_dictionaries(
        {
            "compute_capability": capabilities,
            "total_mib": mib,
            "free_mib": mib,
            "mig_mode": st.none() | st.booleans(),
            "error": st.none() | st.just("GPU is lost"),
        }
    ),
    max_size=4,
)


@settings(deadline=None)  # a busy machine is no failure
@given(
    gpus,
    st.none() | st.just("Driver Not Loaded"),
    st.integers(1, 4),
    st.lists(st.integers(0, 4), max_size=3),
    capabilities,
    st.sampled_from(["docker", "host"]),
)
def test_any_machine_gets_a_consistent_answer(
    cards: list[dict[str, Any]],
    error: str | None,
    count: int,
    asked: list[int],
    capability: tuple[int, int] | None,
    runtime: str,
) -> None:
    nvml = Nvml(error=error, gpus=() if error else tuple(gpu(n, **card) for n, card in enumerate(cards)))
    demand = DEMAND.model_copy(
        update={
            "tensor_parallel_size": count,
            "gpus_asked": tuple(asked),
            "compute_capability": capability,
            "runtime": runtime,
        }
    )
    result = check(host(nvml=nvml), demand)
    severities = {problem.severity for problem in result.problems}
    assert result.verdict == ("refuse" if "refuse" in severities else "warn" if severities else "ok")
    assert set(result.selected) <= {one.uuid for one in nvml.gpus if one.error is None}
    if result.verdict != "refuse":
        assert len(result.selected) == count

"""The training script and its configuration files, as torchrun and accelerate launch start them.

Two ranks on the CPU over gloo. Every run is compared with one process that takes the whole batch. One run of each
launcher is real; the others are forked with the environment that the launcher gives (`forked`).
"""

import contextlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.run
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.constants import DEEPSPEED_MULTINODE_LAUNCHERS
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from forked import free_port, run_forked

from helpers.chapters.c6_distributed import engine
from helpers.chapters.c6_distributed.engine import Asked, EngineError, what_was_asked

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "train_distributed.py"
FILES = {path.stem: path for path in (ROOT / "configs").glob("*.yaml")}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TWO_RANKS = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
ELEMENTS = 2 * 1000 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 160 + 2 * 64) + 64  # of the tiny model: two layers, untied
WHOLE = {"parameters": 4 * ELEMENTS, "gradients": 4 * ELEMENTS, "optimizer": 8 * ELEMENTS}
EXPERIMENT = ["--length", "32", "--steps", "4", "--learning-rate", "0.01"]


def from_file(name, *options):
    return [*ACCELERATE, "--config_file", str(FILES[name]), "--mixed_precision", "no", *options]


def clean_environment():
    taken = ("ACCELERATE_", "FSDP_", "MASTER_", "TORCHELASTIC_")
    names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "COURSE_LANGUAGE"}
    env = {k: v for k, v in os.environ.items() if not k.startswith(taken) and k not in names}
    return env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def given_by(name, *options):
    """What accelerate's launcher, with one of the files, adds to the environment: by its own reading."""
    chosen = ["--config_file", str(FILES[name]), "--mixed_precision", "no", *options, "script.py"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(chosen))
    return {key: value for key, value in prepare_multi_gpu_env(args).items() if os.environ.get(key) != value}


def start(command, mark, **more):
    """The command in a clean environment that carries `mark` to all its processes."""
    env = clean_environment() | {"COURSE_TEST_MARK": mark, **more}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT)


def carriers(mark):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("COURSE_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def launch(*commands, timeout=240, **more):
    """Run the commands side by side until all end; (status, stdout, stderr) of each. None may leave a process."""
    mark = uuid.uuid4().hex
    running = [start(command, mark, **more) for command in commands]
    try:
        ended = [(one.communicate(timeout=timeout), one.returncode) for one in running]
        _, alive = psutil.wait_procs(carriers(mark), timeout=5)
    finally:
        for process in carriers(mark):
            process.kill()
    assert not alive, f"processes are left over: {alive}"
    return [(status, out, err) for (out, err), status in ended]


def run(launcher, *arguments, report=None, script=(SCRIPT,), **more):
    """The experiment through the launcher; (status, stdout, stderr), or the report where one is asked for."""
    command = [*launcher, *map(str, script), *EXPERIMENT, *map(str, arguments), *writing(report)]
    return read(report, *launch(command, **more)[0])


def fork(ranks, environment, *arguments, report=None, script=(SCRIPT,)):
    """The experiment on so many forked ranks; (status, stdout, stderr), or the report where one is asked for."""
    program = [*map(str, script), *EXPERIMENT, *map(str, arguments), *writing(report)]
    return read(report, *run_forked(program, ranks, clean_environment() | environment, free_port()))


def writing(report):
    return [] if report is None else ["--report", str(report)]


def read(report, status, out, err):
    if report is None:
        return status, out, err
    assert status == 0, err[-3000:]
    return json.loads(report.read_text()) | {"text": out}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a configuration alone, and one with weights."""
    from transformers import LlamaConfig

    from virtual_gpu.models.build import build_model

    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=1000, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(folder / "alone")
    torch.manual_seed(1)
    build_model(config, torch.float32, device="cpu").save_pretrained(folder / "weights")
    return folder


@pytest.fixture(scope="module")
def one_process(model):
    """The whole batch of 8 in one process: with random weights, and with those of the folder."""
    folder = model
    loaded = ["--model", folder / "weights", "--pretrained", "--batch-size", 8]
    return {
        "alone": fork(1, {}, "--model", folder / "alone", "--batch-size", 8, report=folder / "one.json"),
        "weights": fork(1, {}, *loaded, report=folder / "loaded.json"),
    }


def is_equal(report, reference, within=1e-5):
    return report["losses"] == pytest.approx(reference["losses"], abs=within)


def held(row):
    return {kind: row[kind] for kind in WHOLE}


@pytest.mark.slow
def test_one_process(one_process):
    report = one_process["alone"]
    assert (report["engine"], report["ranks"], report["parameters"]) == (engine.ALONE, 1, ELEMENTS)
    assert held(report["rows"][0]) == WHOLE
    assert len(report["losses"]) == 4
    assert not is_equal(report, one_process["weights"]), "the weights of the folder were not loaded"


@pytest.mark.slow
def test_torchrun_is_data_parallel(model, one_process, tmp_path):
    arguments = ["--model", model / "alone", "--batch-size", 2, "--accumulation", 2, "--checkpointing"]
    report = run(TWO_RANKS, *arguments, "--expect-ranks", 2, report=tmp_path / "report.json")
    assert (report["engine"], report["ranks"]) == ("DDP", 2)
    assert [held(row) for row in report["rows"]] == [WHOLE, WHOLE]
    assert is_equal(report, one_process["alone"])
    lines = report["text"].splitlines()
    assert lines[0] == "엔진: DDP (요청: DDP) · rank: 2 (요청: 2)"
    assert [line.split()[:2] for line in lines[2:4]] == [["rank", "0"], ["rank", "1"]] and len(lines) == 5


@pytest.mark.slow
def test_accelerate_launch_is_data_parallel(model, one_process, tmp_path):
    arguments = ["--model", model / "alone", "--batch-size", 4]
    report = run(from_file("ddp"), *arguments, report=tmp_path / "report.json")
    assert (report["engine"], report["ranks"]) == ("DDP", 2)
    assert is_equal(report, one_process["alone"])


@pytest.mark.stress
def test_two_nodes(model, one_process, tmp_path):
    """Two launchers of one rank each, as on two machines; only the first prints."""
    port, arguments = free_port(), ["--model", model / "alone", "--batch-size", 4, "--expect-ranks", 2]
    arguments = [*EXPERIMENT, *map(str, arguments), "--report", str(tmp_path / "report.json")]
    nodes = [
        [
            *TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node),
            "--master-addr", "127.0.0.1", "--master-port", port, str(SCRIPT), *arguments,
        ]
        for node in range(2)
    ]  # fmt: skip
    first, second = launch(*nodes)
    assert first[0] == second[0] == 0, first[2][-2000:] + second[2][-2000:]
    assert "DDP" in first[1] and not second[1]
    assert is_equal(json.loads((tmp_path / "report.json").read_text()), one_process["alone"])


def is_half(row):
    """Half of everything; the tiny model's dimensions are all even."""
    return held(row) == {kind: nbytes // 2 for kind, nbytes in WHOLE.items()}


@pytest.mark.slow
def test_the_script_shards_by_itself(model, one_process, tmp_path):
    arguments = ["--model", model / "weights", "--pretrained", "--batch-size", 2, "--accumulation", 2, "--fully-shard"]
    report = fork(2, given_by("fsdp2"), *arguments, report=tmp_path / "report.json")
    assert (report["engine"], report["by_hand"], report["ranks"]) == ("FSDP2", True, 2)
    assert all(map(is_half, report["rows"]))
    assert is_equal(report, one_process["weights"])


@pytest.mark.slow
def test_fsdp2_by_accelerate(model, one_process, tmp_path):
    script = (Path(__file__).with_name("fsdp2_on_cpu.py"), SCRIPT)
    arguments = ["--model", model / "alone", "--batch-size", 2, "--accumulation", 2]
    report = fork(2, given_by("fsdp2"), *arguments, script=script, report=tmp_path / "report.json")
    assert (report["engine"], report["by_hand"], report["ranks"]) == ("FSDP2", False, 2)
    assert all(map(is_half, report["rows"]))
    assert is_equal(report, one_process["alone"])


@pytest.mark.slow
@pytest.mark.skipif(not DEEPSPEED, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("name", ["deepspeed_zero2", "deepspeed_zero3"])
def test_deepspeed(model, one_process, tmp_path, name):
    arguments = ["--model", model / "weights", "--pretrained", "--batch-size", 2, "--accumulation", 2]
    report = run(from_file(name), *arguments, report=tmp_path / "report.json", timeout=500)
    assert (report["engine"], report["ranks"]) == (f"DeepSpeed ZeRO-{name[-1]}", 2)
    assert report["clipping"] == 1e9 and "그레이디언트 클리핑: 1e+09" in report["text"]
    own_weights = 2 * ELEMENTS  # half of them, in fp32
    for row in report["rows"]:
        assert row["parameters"] == pytest.approx(WHOLE["parameters"] / (2 if name[-1] == "3" else 1), rel=0.01)
        assert row["gradients"] == pytest.approx(WHOLE["gradients"] / 2, rel=0.01)
        assert row["optimizer"] == pytest.approx(WHOLE["optimizer"] / 2 + own_weights, rel=0.01)
    assert is_equal(report, one_process["weights"], within=1e-4)


# -- less than was asked for -----------------------------------------------------------------------------------------


def refusal(status, out, err):
    """The one line that says why."""
    assert status not in (0, None) and not out
    (line,) = [line for line in err.splitlines() if line.startswith("멈춤:")]
    return line


@pytest.mark.stress  # chapter 6 does it too
def test_accelerate_launch_on_a_cpu_starts_one_process(model):
    launcher, arguments = [*ACCELERATE, "--cpu", "--num_processes", "2"], ["--model", model / "alone"]
    assert "하나만 떴다" in refusal(*run(launcher, *arguments))
    status, out, err = run(launcher, *arguments, "--expect-ranks", 1)
    assert status == 0 and out.startswith(f"엔진: {engine.ALONE}"), err


@pytest.mark.stress
def test_a_file_does_not_change_that(model):
    launcher = [*ACCELERATE, "--cpu", "--config_file", str(FILES["fsdp2"])]
    assert "하나만 떴다" in refusal(*run(launcher, "--model", model / "alone"))


@pytest.mark.slow
def test_accelerate_ignores_fsdp_on_a_cpu(model):
    said = refusal(*fork(2, given_by("fsdp2"), "--model", model / "alone"))
    assert "요청한 엔진은 FSDP2" in said and "DDP" in said and "--fully-shard" in said


@pytest.mark.slow
def test_accelerate_ignores_fp16_on_a_cpu(model):
    said = refusal(*fork(2, given_by("ddp", "--mixed_precision", "fp16"), "--model", model))
    assert "fp16" in said and "fp32로 계산한다" in said


@pytest.mark.stress  # what it asks is asked without a launcher too: test_what_cannot_come_is_refused
def test_another_number_of_ranks(model):
    said = refusal(*run(TWO_RANKS, "--model", model / "alone", "--expect-ranks", 4))
    assert "4개를 기대했는데 2개" in said


@pytest.mark.slow
@pytest.mark.parametrize("deepspeed", [False, pytest.param(True, marks=pytest.mark.skipif(not DEEPSPEED, reason=""))])
def test_ranks_that_do_not_know_of_each_other(tmp_path, deepspeed):
    """Accelerator() without cpu=True, on a machine without a GPU: each rank would train on all the data."""
    program = tmp_path / "alone.py"
    # None leaves before the other has come: its end would close what the other is still connecting to.
    program.write_text(
        "import os, torch; from accelerate import Accelerator; from helpers.chapters.c6_distributed import engine\n"
        "accelerator = Accelerator()\n"
        "try: engine.check_group(engine.what_was_asked(), accelerator.num_processes)\n"
        "except engine.EngineError as error: print(error, flush=True)\n"
        "torch.distributed.barrier()\n"
        "os._exit(0)\n"
    )
    if deepspeed:
        status, out, err = launch([*from_file("deepspeed_zero2"), str(program)], DS_ACCELERATOR="cpu")[0]
    else:
        status, out, err = run_forked([str(program)], 2, clean_environment() | given_by("ddp"), free_port())
    assert status == 0, err[-2000:]
    assert out.count("rank 2개를 요청했는데 서로 통신하는 rank는 2개, accelerate가 아는 rank는 1개다") == 2


@pytest.mark.slow
@pytest.mark.skipif(DEEPSPEED, reason="DeepSpeed is installed")
def test_deepspeed_that_is_not_there(model):
    said = refusal(*fork(2, {"ACCELERATE_USE_DEEPSPEED": "true"}, "--model", model / "alone"))
    assert "DeepSpeed가 설치되어 있지 않다" in said


@pytest.mark.stress
@pytest.mark.skipif(DEEPSPEED, reason="DeepSpeed is installed")
def test_accelerates_launcher_says_first_that_deepspeed_is_not_there(model):
    status, out, err = run(from_file("deepspeed_zero2"), "--model", model / "alone")
    assert status != 0 and not out and "DeepSpeed is not installed" in err


def test_what_cannot_come_is_refused():
    launched = {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    fsdp, deepspeed = launched | {"ACCELERATE_USE_FSDP": "true"}, launched | {"ACCELERATE_USE_DEEPSPEED": "true"}
    assert what_was_asked({}) == Asked(engine.ALONE, 1)
    assert what_was_asked(launched) == Asked("DDP", 2)
    assert what_was_asked(launched, fully_shard=True) == Asked("FSDP2", 2)
    for env, settings, words in [
        ({}, {"fully_shard": True}, "torchrun"),
        ({}, {"expect_ranks": 2}, "2개를 기대했는데 1개"),
        (launched, {"expect_ranks": 4}, "4개를 기대했는데 2개"),
        ({"MASTER_ADDR": "127.0.0.1"}, {}, "하나만 떴다"),
        (fsdp | {"FSDP_VERSION": "1"}, {}, "fsdp_version: 2"),
        (deepspeed, {"fully_shard": True}, "DeepSpeed와 함께 쓸 수 없다"),
    ]:
        with pytest.raises(EngineError, match=words):
            what_was_asked(env, **settings)


def test_what_came_is_compared():
    plain = torch.nn.Linear(2, 2)
    engine.check_engine(Asked("DDP", 1), plain)  # nothing to share: the same
    for asked in (Asked("DDP", 2), Asked("FSDP2", 1), Asked("DeepSpeed ZeRO-3", 2)):
        with pytest.raises(EngineError, match="실제로 쓰인 것은 프로세스 하나"):
            engine.check_engine(asked, plain)
    rows = [{"optimizer_on": ["cpu"]}, {"optimizer_on": ["cuda"]}]
    engine.check_offload(Asked("DeepSpeed ZeRO-3", 2), rows)
    with pytest.raises(EngineError, match="cpu, cuda에 있다"):
        engine.check_offload(Asked("DeepSpeed ZeRO-3", 2, offload=True), rows)


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    engine.check_machine(Asked("DDP", 2), {"LOCAL_WORLD_SIZE": "1"})
    with pytest.raises(EngineError, match="GPU가 1개인데 rank가 2개"):
        engine.check_machine(Asked("DDP", 2), {"LOCAL_WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "1 이상의 정수"),
        (["--batch-size", "3.5"], "1 이상의 정수"),
        (["--batch-size", "-2"], "1 이상의 정수"),
        (["--learning-rate", "nan"], "0보다 큰 수"),
        (["--layer", "2", "--no-such"], "--no-such"),
        (["--pretrained", "--layers", "2"], "함께 쓸 수 없다"),
        (["--report", "/no/such/folder/report.json"], "폴더 /no/such/folder가 없다"),
        (["--model", "gpt22"], "gpt2"),
        (["--model", "gpt2", "--length", "1025"], "최대 길이는 1024"),
        (["--model", "gpt2", "--steps", "100000000"], "너무 크다"),
        (["--model", "gpt2", "--pretrained", "--length", "8"], "gpt2"),
        (["--fully-shard"], "torchrun"),
        (["--expect-ranks", "3"], "3개를 기대했는데 1개"),
    ],
)
def test_bad_input_in_clear_words(arguments, words, monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "MASTER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    said = capsys.readouterr()
    assert left.value.code == 2 and not said.out
    assert said.err.startswith("멈춤: ") and words in said.err


# -- the files ---------------------------------------------------------------------------------------------------------

ENGINES = {
    "ddp": (DistributedType.MULTI_GPU, Asked("DDP", 2)),
    "fsdp2": (DistributedType.FSDP, Asked("FSDP2", 2)),
    "deepspeed_zero2": (DistributedType.DEEPSPEED, Asked("DeepSpeed ZeRO-2", 2)),
    "deepspeed_zero3": (DistributedType.DEEPSPEED, Asked("DeepSpeed ZeRO-3", 2)),
    "deepspeed_zero3_offload": (DistributedType.DEEPSPEED, Asked("DeepSpeed ZeRO-3", 2, offload=True)),
}


def test_every_file_is_checked():
    assert set(FILES) == set(ENGINES)


@pytest.mark.parametrize("name", ENGINES)
def test_a_file_leads_to_its_engine(name):
    """By accelerate's own reading, into the environment that its launcher gives to every rank."""
    config = load_config_from_file(str(FILES[name]))
    assert isinstance(config, ClusterConfig) and config.distributed_type == ENGINES[name][0]
    args = launch_command_parser().parse_args(["--config_file", str(FILES[name]), "script.py"])
    args, *_ = _validate_launch_command(args)
    args.deepspeed_fields_from_accelerate_config = ",".join(config.deepspeed_config)
    env = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    assert what_was_asked(env | {"LOCAL_RANK": "0", "WORLD_SIZE": str(args.num_processes)}) == ENGINES[name][1]
    assert env["ACCELERATE_MIXED_PRECISION"] == "bf16"
    if args.use_deepspeed:
        assert float(env["ACCELERATE_GRADIENT_CLIPPING"]) == 1e9


@pytest.mark.parametrize("name", ENGINES)
def test_the_lines_for_several_nodes(name, tmp_path):
    text = FILES[name].read_text(encoding="utf-8")
    head, lines = text.split("# Two nodes of 8 GPUs", 1)
    replaced = [
        line.removeprefix("# ") for line in lines.splitlines()[1:] if not line.startswith("# and in deepspeed_config")
    ]
    keys = [line.split(":")[0] for line in replaced]
    kept = [line for line in head.splitlines() if line.split(":")[0] not in keys]
    merged = tmp_path / "nodes.yaml"
    merged.write_text("\n".join([*kept, *replaced]))
    config = ClusterConfig.from_yaml_file(str(merged))
    assert (config.num_machines, config.num_processes, config.machine_rank) == (2, 16, 0)
    assert config.main_process_ip and config.main_process_port
    if name.startswith("deepspeed"):
        assert f"deepspeed_multinode_launcher: {DEEPSPEED_MULTINODE_LAUNCHERS[1]}" in lines


@pytest.mark.parametrize("page", ["README.md", "README.ko.md"])
def test_the_pages_beside_the_files(page, monkeypatch):
    """Both name every file, and their command is one that torchrun and the script understand."""
    text = (ROOT / "configs" / page).read_text(encoding="utf-8")
    assert {f"`{path.name}`" for path in FILES.values()} <= set(re.findall(r"`[a-z0-9_]+\.yaml`", text))
    (block,) = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    name, *words = shlex.split(block.replace("\\\n", " "))
    args = torch.distributed.run.get_args_parser().parse_args(words)
    assert name == "torchrun" and (ROOT / args.training_script) == SCRIPT
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "8", 0)
    monkeypatch.setattr(sys, "argv", [args.training_script, *args.training_script_args])
    assert runpy.run_path(str(SCRIPT))["read_arguments"]().expect_ranks == 16


@pytest.mark.skipif(not DEEPSPEED, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("name", [name for name in ENGINES if name.startswith("deepspeed")])
def test_deepspeed_takes_the_file(name, monkeypatch):
    from accelerate import DeepSpeedPlugin
    from deepspeed.runtime.config import DeepSpeedConfig

    fields = yaml.safe_load(FILES[name].read_text(encoding="utf-8"))["deepspeed_config"]
    places = {key: fields[f"{key}_device"] for key in ("offload_optimizer", "offload_param")}
    plugin = DeepSpeedPlugin(
        zero_stage=fields["zero_stage"],
        gradient_clipping=fields["gradient_clipping"],
        gradient_accumulation_steps=1,
        offload_optimizer_device=places["offload_optimizer"],
        offload_param_device=places["offload_param"],
    )
    settings = plugin.deepspeed_config | {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}
    config = DeepSpeedConfig(settings)
    assert config.zero_optimization_stage == fields["zero_stage"]
    assert config.gradient_clipping == 1e9  # with 0.0 it would be 1.0
    for key, place in places.items():
        offload = getattr(config.zero_config, key)
        assert ("none" if offload is None else getattr(offload.device, "value", offload.device)) == place

"""Every exercise and case: its own solution is right, an empty stub is said to be empty, wrong answers are weighed."""

import re

import pytest
import torch

from helpers import case, exercise, predict_memory
from helpers.chapters import CHAPTERS, of_chapter
from helpers.chapters.c3_memory.losses import whole_loss
from helpers.chapters.c12_two_models import trained


def pytorchs_loss(hidden, head, labels):
    options = torch.nn.LinearCrossEntropyOptions()
    return torch.nn.functional.linear_cross_entropy(hidden, head, labels, options=options)


NUMBERS = [number for chapter in CHAPTERS for number in of_chapter(chapter)]
CASES = [number for chapter in CHAPTERS for number in of_chapter(chapter, "CASES")]


def said(capsys) -> str:
    return capsys.readouterr().out


@pytest.mark.parametrize("number", NUMBERS)
def test_the_solution_is_right(number, capsys):
    one = exercise(number)
    one.solution()
    names = {"predict_memory": predict_memory, "scores": trained.scores, "torch": torch}
    exec("import torch", names)
    exec(said(capsys), names)
    answer = names[re.findall(r"^(?:def )?(\w+)(?:\(| = )", one.answer, re.MULTILINE)[0]]
    one.check(answer)
    assert "정답!" in said(capsys)


@pytest.mark.parametrize("number", CASES)
def test_a_case_is_solved_within_its_budget(number, capsys):
    one = case(number)
    one.restart()
    names = {"case": case}
    exec(one.answer, names)
    one.check(names[re.findall(r"^(\w+) = ", one.answer, re.MULTILINE)[-1]])
    assert "정답!" in said(capsys) and one.thread
    assert 0 < one._used <= one.budget


NONSENSE = ["몰라", 42, -1.5, True, float("nan"), {}, {"x": 1}, [], [None], (), set(), object(), b"", len]


# What is an answer there, and so a search or some runs: the wrong answers below are enough of those.
ANSWERS = {"9-2": [{}], "12-A": [42], "11-A": [{}]}


@pytest.mark.parametrize("number", NUMBERS + CASES)
def test_nonsense_gets_one_sentence(number, capsys):
    """And never a traceback of our own, nor the right answer."""
    one = exercise(number) if number in NUMBERS else case(number)
    for answer in [answer for answer in NONSENSE if answer not in ANSWERS.get(number, ())]:
        one.check(answer)
        told = said(capsys)
        assert told.startswith(f"[{number}] ") and told.count("\n") == 1, (answer, told)
        assert "정답!" not in told and not re.search(r"(Attribute|Type|Key|Index)Error", told), (answer, told)


@pytest.mark.parametrize("number", NUMBERS + CASES)
def test_an_empty_stub_and_hints(number, capsys):
    one = exercise(number) if number in NUMBERS else case(number)
    for stub in (..., lambda *_: ...):
        one.check(stub)
        assert "정답!" not in said(capsys)
    hints = [one.hint() or said(capsys) for _ in range(6)]
    assert hints[-1] == hints[-2] and all(hint.startswith(f"[{number}]") for hint in hints)


@pytest.mark.parametrize(
    "number, answer, verdict",
    [
        ("1-1", lambda e, m: 2.0 ** (2 ** (e - 1)), "거의 맞다"),
        ("1-2", {"fp16": 1024, "bf16": 256}, "0.5배"),
        ("1-3", lambda x, noise: x, "bf16에 없는 수"),
        ("1-3", lambda x, noise: x.bfloat16().float(), "개가 다르다"),
        ("1-3", lambda x, noise: x[:4], "모양의 텐서"),
        ("1-A", {"frozen": "fp16", "adapter": "fp16", "scaler": True}, "같은 오류"),
        ("1-A", {"frozen": "fp16", "adapter": "fp16", "scaler": False}, "배우지 않는다"),
        ("1-A", {"frozen": "fp32", "adapter": "fp32"}, "GB 넘친다"),
        ("1-A", {"lr": 1}, "frozen"),
        ("1-B", {"weights": "bf16"}, "배우지 않는다"),
        ("1-B", {"weights": "bf16", "master": True}, "4바이트를 더"),
        ("1-B", {"learning_rate": 1e-3}, "1e-5 그대로"),
        ("2-1", lambda x, bits: (x.round(), x.abs().max() / 128), "스케일이 정답의 0.9922배"),
        ("2-1", lambda x, bits: (x.round(), x.abs().max() / (2 ** (bits - 1) - 1)), "코드"),
        ("2-2", lambda bits, block, double: bits, "정답보다 적다"),
        ("2-3", {"bits": 8}, "예산을 3.40비트"),
        ("2-3", {"bits": 4}, "64개가 모자란다"),
        ("2-3", {"bits": 4, "block_size": 0}, "block_size=0"),
        ("2-3", {"bit": 4}, "bits"),
        ("2-3", {"method": "nvfp4"}, "다른 방법"),
        ("2-A", {"momentum": "fp32", "variance": "linear"}, "배우지 않는다"),
        ("2-A", {"momentum": "fp32", "variance": "dynamic"}, "바이트가 많다"),
        ("2-A", {"block_size": 100}, "block_size=100"),
        ("2-B", {"activations": "token"}, "개를 틀린다"),
        ("2-B", {"threshold": 6.0}, "열 6개를 16비트로"),
        ("2-B", {"smooth": 2}, "smooth=2"),
        ("3-1", [16, 256, 30080, 2], "0.5배"),
        ("3-1", [16, 256, 2048, 58.75], "빠졌다: 어휘의 크기"),
        ("3-1", [16, 256, "V", 4], "숫자가 아니라"),
        ("3-2", {"optimizer": "adamw_fused"}, "예산을"),
        ("3-2", {"optimizer": "sgd"}, "Adam 계열"),
        ("3-2", {"batch_size": 1}, "모르는 설정"),
        ("3-2", {"optimizer": "adamw_8bit", "gradient_checkpointing": True, "attention": "sdpa"}, "3개 바꾸었다"),
        ("3-3", whole_loss, "5.88 GiB"),
        ("3-3", lambda hidden, head, labels: 2 * whole_loss(hidden, head, labels), "틀렸다"),
        ("3-3", pytorchs_loss, "셀 수 없다"),
        ("3-4", 3, "더 키울 수 있다"),
        ("3-4", 20, "한도를"),
        ("3-A", 1024, "스텝 11에서 멈춘다"),
        ("3-A", 512, "덜 잘라도 간다"),
        ("3-A", "short", "토큰의 수"),
        ("3-B", {"batch_size": 4}, "에서 멈춘다"),
        ("3-B", {"keep": "nothing"}, "남지 않는다"),
        ("3-B", {"keep": "all"}, "모르는 keep"),
        ("4-1", {"batch_size": 32}, "한도를"),
        ("4-1", {"batch_size": 1, "gradient_accumulation_steps": 32}, "2 × 16도 들어간다"),
        ("4-1", {"batch_size": 4, "gradient_accumulation_steps": 4}, "16이다. 32이어야"),
        ("4-1", {"optimizer": "sgd"}, "모르는 설정"),
        ("4-2", lambda counts: [1 / len(counts)] * len(counts), "0.25을(를) 곱했다. 0.1863"),
        ("4-2", lambda counts: 1.0, "4개의 목록"),
        ("4-3", lambda samples, micro, steps: samples // (micro * steps), "0.75배"),
        ("4-A", 13.3, "누적하지 않을 때"),
        ("4-A", 169.5, "2번과 3번을"),
        ("4-A", 10, "0.63배"),
        ("4-B", {"undivided", "clipped_inside"}, "1개를 찾았고, 죄 없는 것을 1개"),
        ("4-B", "mean_of_means", "1개를 찾았고, 죄 없는 것을 0개"),
        ("4-B", {"scheduled_inside"}, "모르는 실수"),
        ("5-1", lambda start, end, slots: (start + end + 1) // 2, "6번으로도"),
        ("5-1", lambda start, end, slots: start, "까지여야"),
        ("5-2", lambda block, result: True, "더 줄여야"),
        ("5-2", lambda block, result: result == "attention", "가장 좋은 기록은"),
        ("5-3", {"batch_size": 2, "gradient_accumulation_steps": 2}, "한도를"),
        ("5-3", {"gradient_accumulation_steps": 4, "gradient_checkpointing": True}, "연산이 더 적거나"),
        ("5-3", {"batch_size": 1, "gradient_accumulation_steps": 8}, "4이어야"),
        ("5-3", {"batch_size": 4, "optimizer": "sgd"}, "모르는 설정"),
        ("6-1", lambda means, rows: sum(means) / len(means), "0.8배"),
        ("6-1", lambda means, rows: str(means), "숫자가 아니라"),
        ("6-2", lambda stage, parameters, n: 16 * parameters / max(n * (stage == 3), 1), "stage=1"),
        ("6-2", lambda stage, parameters, n: 1 / 0, "ZeroDivisionError"),
        ("6-3", lambda weights, gradients, momentum, lr: (weights, [m.repeat(len(m)) for m in momentum]), "자기 조각"),
        ("6-3", lambda weights, gradients, momentum, lr: (weights, momentum), "스텝 0: DDP의 가중치와"),
        ("6-4", 8, "넘친다"),
        ("6-4", 16, "하나 줄여도"),
        ("6-4", 8.5, "1 이상의 정수"),
        ("6-A", {"ranks": 64}, "그래도"),
        ("6-A", {"batch_size": 1}, "그대로 두어야"),
        ("6-A", {"ranks": 64, "gradient_checkpointing": True}, "하나만"),
        ("6-B", 4 * 8.03 / 8, "0.134배"),
        ("7-1", lambda stages, most: (stages - 1) / most, "1.19배"),
        ("7-1", lambda stages, most: 0, "0배"),
        ("7-2", {"gate_proj": "columns", "up_proj": "columns", "down_proj": "rows"}, "나누지 않은 행렬이 남았다"),
        ("7-2", {"q_proj": "columns"}, "이 계획으로는 나눌 수 없다"),
        ("7-2", {"q_proj": "diagonals"}, "쓸 수 있는 값: columns, rows"),
        ("7-2", {"q_proj": ...}, "아직 비어 있다: q_proj"),
        ("7-2", "columns", "사전(dict)"),
        ("8-1", lambda shapes, r: sum(out * into for out, into in shapes), "12.5배"),
        ("8-1", lambda shapes, r: sum(r * out for out, into in shapes), "0.5배"),
        ("8-2", lambda W, A, B, alpha: W + B @ A, "다르다"),
        ("8-2", lambda W, A, B, alpha: A, "같은 모양 (6, 4)"),
        ("8-3", {"peft": "lora", "gradient_checkpointing": True}, "T4의 한도를"),
        ("8-3", {"peft": "qlora", "gradient_checkpointing": True}, "모자란다"),
        ("8-3", {"batch_size": 1}, "모르는 설정"),
        ("8-3", {"peft": "qlora", "lora_rank": 0}, "lora_rank=0"),
        ("8-A", {"rank": 64}, "3개가 모자란다"),
        ("8-A", {"lr": 0.01, "alpha": 64}, "하나만"),
        ("8-A", {"steps": 500}, "모르는 설정"),
        ("8-B", {"gradient_checkpointing": True}, "다시 계산했을 뿐"),
        ("8-B", {"lora_rank": 1}, "더 많다"),
        ("8-B", {"peft": "lora"}, "QLoRA인 채로"),
        ("7-A", ("1F1B", 8), "27.3%"),
        ("7-B", 4, "8도 된다"),
        ("7-B", 16, "나눌 수 없다"),
        ("9-1", lambda one, two, limit: 16, "8인데 16"),
        ("9-1", lambda one, two, limit: 8, "0인데 8"),
        ("9-1", lambda one, two, limit: max((n for n in (1, 2, 4, 8, 16) if n * one <= limit), default=0), "8인데 2"),
        ("9-1", lambda one, two, limit: (limit - one) / (two - one) + 1, "0이나"),
        ("9-2", {"methods": ("lora",)}, "들어가는 것이 없다"),
        ("9-2", {"length": 64, "methods": ("qlora",)}, "512 이상"),
        ("9-2", {"gpu": "H200"}, "모르는 설정"),
        ("9-2", 3, "사전"),
        ("9-3", {"row": 2, "change": {"gradient_checkpointing": True}}, "저장한 텐서가 있었는가"),
        ("9-3", {"row": 1, "change": {"gradient_checkpointing": True}}, "고른 행에서 바꾸는 것이 아니다"),
        ("9-3", {"row": 1, "change": {"optim": "adamw_torch"}}, "행은 맞다"),
        ("9-3", {"row": 3, "change": {"expandable_segments": True}}, "더 만들 것까지"),
        ("9-3", {"row": 2, "change": {"lora": True}}, "들어간다"),
        ("9-3", {"row": 4, "change": {"lora": True}}, "예측에서 이미"),
        ("9-3", {"row": 5, "change": {"lora": True}}, "표의 행은"),
        ("9-3", {"row": "states", "change": {"lora": True}}, "1 이상의 정수"),
        ("9-3", {"row": 1, "change": {"lora": True, "length": 128}}, "하나만"),
        ("9-3", {"row": 1, "change": "--lora True"}, "하나만"),
        ("9-3", {"row": 2, "change": {"optim": "adamw_bnb_8bit"}}, "들어가지만, 여유"),
        ("9-3", {"row": 1, "change": {"output_dir": "/"}}, "모르는 설정"),
        ("9-3", {"row": 1, "change": {"optim": "sgd"}}, "쓸 수 있는 값: adamw_torch"),
        ("9-3", {"row": 1}, "비어 있다"),
        ("9-4", "T4", "넘친다"),
        ("9-4", "H100", "더 작은 GPU"),
        ("9-4", "T5", "모르는 GPU"),
        ("9-A", {"micro_batch": 1}, "넘친다"),
        ("9-A", {"gpus": 8}, "넘친다"),
        ("9-A", {"gpus": 8, "stage": 2, "micro_batch": 1}, "넘친다"),
        ("9-A", {"gpus": 8, "micro_batch": 1}, "누적이 더 적은"),
        ("9-A", {"gpus": 8, "checkpointing": True}, "추가 연산이 +"),
        ("9-A", {"gpus": 3}, "2, 4, 8"),
        ("9-A", {"micro_batch": 3}, "나눌 수 없다"),
        ("9-A", {"micro_batch": 0}, "1 이상의 정수"),
        ("9-A", {"length": 256}, "모르는 설정"),
        ("9-B", {}, "다르다"),
        ("9-B", {"checkpointing": True}, "-4.7% 다르다"),
        ("9-B", {"method": "qlora"}, "그래프는 LoRA다"),
        ("9-B", {"length": 512}, "모르는 설정"),
        ("10-1", lambda lengths, budget: [[n] for n in lengths[:-1]], "꼭 한 번씩"),
        ("10-1", lambda lengths, budget: [lengths[i : i + 16] for i in range(0, len(lengths), 16)], "예산은 4,096"),
        ("10-1", lambda lengths, budget: [lengths[i : i + 4] for i in range(0, len(lengths), 4)], "패딩이다"),
        ("10-2", lambda model, batches: model(input_ids=batches[0], labels=batches[0]).loss, "파이썬의 수"),
        ("10-2", lambda model, batches: 1.0, "이어야 한다"),
        (
            "10-2",
            lambda model, batches: (sum(model(input_ids=x, labels=x).loss for x in batches) / len(batches)).item(),
            "무엇인가 남는다",
        ),
        (
            "10-2",
            lambda model, batches: sum(model(input_ids=x, labels=x).loss.item() for x in batches) / len(batches),
            "그래프 없이는",
        ),
        ("10-B", {"why": "leak", "change": {"expandable": True}}, "스텝 뒤에 남는 텐서"),
        ("10-B", {"why": "longest", "change": {"max_length": 256}}, "T를 더한 것"),
        ("10-B", {"why": "fragmentation", "change": {"seed": 4}}, "에서 죽는다"),
        ("10-B", {"why": "fragmentation", "change": {"max_length": 256}}, "글은 그대로"),
        ("10-B", {"why": "fragmentation"}, "비어 있다"),
        ("10-B", {"why": "memory", "change": {}}, "모르는 까닭"),
        ("10-B", "leak", "꼴이 다르다"),
        ("10-A", {"where": "inside", "record": "message"}, "아직 살아 있다"),
        ("10-A", {"collect": True}, "아직 살아 있다"),
        ("10-A", {"record": "message", "collect": True}, "하나면 된다"),
        ("10-A", "after", "꼴이 다르다"),
        ("11-1", lambda samples, batch, length, vocabulary, each: samples * length * vocabulary * each, "0.5배"),
        ("11-2", lambda c, tokens, batch, each: 4 * c.hidden_size * tokens * batch, "배"),
        ("11-A", {"keep": "nothing"}, "남지 않는다"),
        pytest.param("11-A", {"keep": 4096}, "더 남길 수 있다", marks=pytest.mark.stress),
        ("11-A", {"keep": 16384}, "OOM"),
        pytest.param("11-A", {"keep": 32768, "accumulate": 1}, "Killed", marks=pytest.mark.stress),
        ("11-A", {"keep": 5}, "2의 거듭제곱"),
        ("11-A", {"batch_size": 1}, "accumulate"),
        ("11-B", {"map_location": "cpu"}, "Killed"),
        ("11-B", {"map_location": "cuda"}, "OOM"),
        ("11-B", {"model": "drop"}, "OOM"),
        ("11-B", {"ema": "cpu", "optimizer": "drop"}, "OOM"),
        ("11-B", {"model": "cpu", "ema": "cpu"}, "Killed"),
        ("11-B", {"model": "drop", "ema": "drop"}, "EMA"),
        ("11-B", {"batch_size": 1}, "map_location"),
        ("12-2", lambda held, step, engine, sleeps: held + step + engine, "배"),
        ("12-1", trained.whole_loss, "아직 세 칸이 아니다"),
        ("12-1", lambda model, ids: trained.scores(model, ids)[1].sum(), "손실이"),
        (
            "12-1",
            lambda model, ids: 2 * trained.whole_loss(model, ids) - trained.whole_loss(model, ids).detach(),
            "그레이디언트가 다르다",
        ),
        ("12-A", 2048, "마지막 것이 신고와 다르다"),
        pytest.param("12-A", 5803, "DPO 2", marks=pytest.mark.stress),
        ("12-A", 9208, "SFT 4: OOM. 마지막"),
        ("12-A", 100_000, "최대 길이는 40960"),
        pytest.param("12-B", 0.3, "스텝 2의 역전파에서 OOM", marks=pytest.mark.stress),
        ("12-B", 0.1, "0.15로 늘려도"),
        ("12-B", 0.22, "0.05 단위"),
        ("12-B", True, "fraction"),
    ],
)
def test_a_wrong_answer_is_told_how_wrong(number, answer, verdict, capsys):
    one = exercise(number) if number in NUMBERS else case(number)
    one.check(answer)
    out = said(capsys)
    assert verdict in out and "정답!" not in out


def test_an_unknown_exercise_is_answered_with_those_there_are():
    with pytest.raises(ValueError, match="3-1"):
        exercise("9-9")

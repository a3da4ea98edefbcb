"""Tests notice: each rule switched off, and each constant of a rule changed, fails a named test.

`make stress` runs the mutants; that every rule has a test named here is asked in every run.
"""

from pathlib import Path

import pytest
from forked import run_forked

from virtual_gpu.rules.active import RULES

TESTS = Path(__file__).parent
ATTENTION, AUTOCAST, REQUESTS, ONE_BY_ONE, FOUR_BIT, SUMS, CONSTANTS = (
    f"tests/rules/test_{name}.py::test_"
    for name in ("attention", "autocast", "requests", "rules", "four_bit", "accumulate", "constants")
)
STEP = REQUESTS + "all_requests_of_a_card_in_their_order[trainstep-512]"
NOTICED_BY = {
    "attention": ATTENTION + "what_the_efficient_kernel_saves",
    "pinned_power_of_two": "tests/test_host.py::test_pinned_memory_is_a_power_of_two_and_stays",
    "cudnn_attention": ONE_BY_ONE + "what_holds_when",  # it keeps the bytes that flash attention keeps
    "cudnn_wide_heads": ONE_BY_ONE + "what_holds_when",
    "cudnn_dropout": ONE_BY_ONE + "what_holds_when",
    "cudnn_attention_workspace": "tests/test_operations.py::test_what_one_h100_asked_for",
    "efficient_gqa": ONE_BY_ONE + "grouped_heads_are_not_copied",
    "dropout_mask": ONE_BY_ONE + "what_is_kept_without_a_rule[dropout_mask]",
    "layer_norm_statistics": ONE_BY_ONE + "what_is_kept_without_a_rule[layer_norm_statistics]",
    "fused_rms_norm": ONE_BY_ONE + "rms_norm_is_one_kernel",
    "group_norm_temporaries": ONE_BY_ONE + "group_norms_sums",
    "softmax_dense": ONE_BY_ONE + "softmax_of_a_slice_copies_it",
    "softmax_backward": ONE_BY_ONE + "softmaxs_backward_makes_a_product",
    "sort_temporaries": ONE_BY_ONE + "a_sorts_second_arrays",
    "softmax_half": ONE_BY_ONE + "softmax_of_fp16_in_fp32_makes_no_copy",
    "autocast": AUTOCAST + "what_stays_in_fp32",
    "grouped_mm": ONE_BY_ONE + "experts_in_one_product_can_be_left_out",
    "cublas_operands": ONE_BY_ONE + "an_operand_without_dense_rows_is_copied",
    "cublas_workspace": REQUESTS + "the_first_requests_of_all",
    "cublas_workspace_not_kept": ONE_BY_ONE + "a_workspace_that_is_not_kept",
    "cublaslt_workspace": ONE_BY_ONE + "a_product_with_a_bias_has_a_workspace_of_its_own_up_to_2_11",
    "scan_temporaries": ONE_BY_ONE + "what_is_summed_up_is_cast_first_and_a_single_row_takes_storage",
    "accumulate_in_place": SUMS + "as_many_tensors_as_an_unwatched_step",
    "attention_temporaries": ONE_BY_ONE + "attentions_temporaries_count_at_the_peak",
    "index_temporaries": REQUESTS + "all_requests_of_a_card_in_their_order[trainstep-128]",
    "embedding_backward": ONE_BY_ONE + "an_embeddings_backward_request_by_request",
    "embedding_accumulates": ONE_BY_ONE + "an_embeddings_backward_request_by_request",
    "reduction_buffers": REQUESTS + "the_first_requests_of_all",
    "pointwise_losses": ONE_BY_ONE + "a_loss_of_every_element_is_reduced",
    "foreach_norm": ONE_BY_ONE + "clipping_takes_a_number_for_each_chunk",
    "one_hot": ONE_BY_ONE + "one_hot_scatters",
    "unscale_bf16": "tests/program/test_interfaces.py::test_a_scaler_refuses_bfloat16_as_on_a_card[in_force]",
    "nested_scales": FOUR_BIT + "the_weight_that_is_dequantized_in_forward",
    "gemm_4bit": FOUR_BIT + "the_weight_that_is_dequantized_in_forward",
}
CHANGED = [  # file, what it says, what it is made to say, who notices
    ("rules/reductions.py", "512, 16, 256", "256, 16, 256", ONE_BY_ONE + "buffers_of_a_sum"),
    ("rules/reductions.py", "512, 16, 256", "512, 8, 256", ONE_BY_ONE + "buffers_of_a_sum"),
    ("rules/reductions.py", "512, 16, 256", "512, 16, 512", CONSTANTS + "a_sum_is_shared_from_256_values_a_thread_on"),
    ("rules/reductions.py", "vectors = 4 if", "vectors = 1 if", STEP),
    ("rules/reductions.py", "return 16  #", "return 8  #", ONE_BY_ONE + "buffers_of_reductions"),
    ("rules/foreach.py", "_CHUNK = 65_536", "_CHUNK = 32_768", ONE_BY_ONE + "clipping_takes_a_number_for_each_chunk"),
    ("rules/cub.py", "4: 384 * 14", "4: 384 * 12", ONE_BY_ONE + "a_sorts_second_arrays"),
    ("cards.py", "return 1024", "return 1536", "tests/test_cards.py::test_threads_that_a_card_holds"),
    ("rules/cublas.py", " + 16 * 1024 * 8", "", REQUESTS + "the_first_requests_of_all"),
    ("rules/cublas.py", "down >= max(1, columns)", "True", CONSTANTS + "rows_that_lie_upon_each_other_are_copied"),
    (
        "rules/cublas.py",
        "bias.dim() == 1",
        "True",
        ONE_BY_ONE + "a_product_with_a_bias_has_a_workspace_of_its_own_up_to_2_11",
    ),
    (
        "rules/embedding.py",
        "_FEW_INDICES = 3072",
        "_FEW_INDICES = 8192",
        ONE_BY_ONE + "an_embeddings_backward_request_by_request",
    ),
    ("rules/embedding.py", "_ROWS_A_PART = 10", "_ROWS_A_PART = 9", ONE_BY_ONE + "temporaries_by_their_sources"),
    (
        "rules/cub.py",
        "128 * (15 * 4",
        "256 * (15 * 4",
        ONE_BY_ONE + "what_is_summed_up_is_cast_first_and_a_single_row_takes_storage",
    ),
    ("rules/cub.py", "384 * 12", "384 * 6", ONE_BY_ONE + "an_embeddings_backward_request_by_request"),
    ("rules/cublas.py", '"default", "out", ', '"default", ', ONE_BY_ONE + "a_product_into_an_output_that_is_given"),
    ("rules/cublas.py", '"dtype", "dtype_out")', '"dtype")', ONE_BY_ONE + "a_product_with_a_type_of_its_output"),
    ("rules/cublas.py", "in (_aten.bmm, _aten.mm)", "in ()", ONE_BY_ONE + "a_product_into_an_output_that_is_given"),
    ("counting/mode.py", ', ("baddbmm", "bmm.dtype")', ",", ONE_BY_ONE + "a_product_with_a_type_of_its_output"),
    ("rules/attention_memory.py", "// 128) * 128", "// 64) * 64", CONSTANTS + "flash_rounds_lengths_to_128"),
    ("rules/attention_memory.py", "0.8 * slots", "0.4 * slots", ONE_BY_ONE + "attentions_sums_in_forward"),
    (
        "rules/attention_memory.py",
        "_LOCK = 16",
        "_LOCK = 0",
        ONE_BY_ONE + "workspaces_of_the_efficient_backward",
    ),
    ("rules/attention_memory.py", "200 // (batch", "400 // (batch", ONE_BY_ONE + "more_heads_than_200_are_not_split"),
    ("rules/attention_memory.py", "CUDNN_BYTES = 256", "CUDNN_BYTES = 0", ONE_BY_ONE + "temporaries_by_their_sources"),
    ("rules/attention.py", "r.head_dim > 192", "r.head_dim > 128", ATTENTION + "which_kernel_runs"),
    ("rules/attention.py", "r.value_dim <= 256", "r.value_dim <= 128", ATTENTION + "which_kernel_runs"),
    ("rules/attention.py", "alignment = 8 if half", "alignment = 4 if half", ATTENTION + "which_kernel_runs"),
    ("rules/attention.py", "in rules else 128", "in rules else 64", CONSTANTS + "cudnn_takes_heads_up_to_128"),
    (
        "rules/attention.py",
        "(0, 8 - length % 8)",
        "(0, 0)",
        ATTENTION + "a_mask_with_odd_rows_is_padded_once_for_all_heads",
    ),
    ("rules/attention.py", "t.stride(-1) == 1", "True", ATTENTION + "a_last_dimension_that_is_not_dense_goes_to_math"),
    ("rules/dropout.py", "0 < p < 1", "0.5 < p < 1", ONE_BY_ONE + "what_is_kept_without_a_rule[dropout_mask]"),
    (
        "rules/bitsandbytes.py",
        "PACKED_ROWS = 4",
        "PACKED_ROWS = 8",
        FOUR_BIT + "the_weight_that_is_dequantized_in_forward",
    ),
    (
        "rules/accumulate.py",
        "or _holders(args) !=",
        "or _holders(args) ==",
        SUMS + "as_many_tensors_as_an_unwatched_step",
    ),
    (
        "rules/autocast.py",
        "for value in reversed(args)]",
        "for value in args][::-1]",
        CONSTANTS + "arguments_are_cast_from_the_last_to_the_first",
    ),
]


def run_tests(*words):
    """pytest's exit status and its output, of tests on the instrument with one thing changed."""
    status, out, err = run_forked([str(TESTS / "mutants.py"), *words], folder=TESTS.parent, timeout=600)
    return status, out + err


def test_every_rule_is_missed_by_a_test():
    """And the tests and the texts that are named here are there."""
    assert set(NOTICED_BY) == set(RULES)
    for named in {*NOTICED_BY.values(), *(change[-1] for change in CHANGED)}:
        file, _, test = named.partition("::")
        assert f"def {test.partition('[')[0]}(" in (TESTS.parent / file).read_text(encoding="utf-8"), named
    for file, old, _, _ in CHANGED:
        assert (TESTS.parent / "virtual_gpu" / file).read_text(encoding="utf-8").count(old) == 1, (file, old)


@pytest.mark.stress
def test_without_a_change_they_pass():
    tests = {*NOTICED_BY.values(), *(change[-1] for change in CHANGED)}
    status, said = run_tests("text", "rules/registry.py", '"""What a rule is', '"""What a rule is', *sorted(tests))
    assert status == pytest.ExitCode.OK, said[-3000:]


@pytest.mark.stress
@pytest.mark.parametrize("rule", NOTICED_BY)
def test_a_rule_that_is_off_is_missed(rule):
    status, said = run_tests("off", rule, NOTICED_BY[rule])
    assert status == pytest.ExitCode.TESTS_FAILED, said[-3000:]


@pytest.mark.stress
@pytest.mark.parametrize("change", CHANGED, ids=lambda change: f"{change[0]}: {change[2]}")
def test_a_constant_that_is_changed_is_noticed(change):
    status, said = run_tests("text", *change)
    assert status == pytest.ExitCode.TESTS_FAILED, said[-3000:]

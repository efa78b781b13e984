"""Faults of the machine code for chains of layers, and of the choice to use it."""

from tests.mutants.mutant import Mutant

CHAIN, BUILD, ENGINE = "tests/chains/test_chain.py", "tests/chains/test_build.py", "tests/training/test_engines.py"
SUMS = "tests/chains/test_sums.py"

CHAINS = [
    Mutant(
        "chains/chain.cpp",
        "if (factors[example] != 0.0)",
        "if (true)",
        ("tests/training/test_degenerate.py::test_a_record_whose_gradient_is_not_finite_contributes_nothing[dpsgd-compiled]",),
        "0 * inf: one record turns the sum into NaN",
    ),
    Mutant(
        "chains/chain.cpp",
        "squares[example] = sum;",
        "squares[example] = (float)sum;",
        (f"{CHAIN}::test_norm_and_sum_are_float64_of_the_same_numbers",),
        "the clip factor comes from a rounded norm",
    ),
    Mutant(
        "chains/chain.cpp",
        "total[k] += factors[example] * (double)gradient[k]",
        "total[k] += (float)factors[example] * gradient[k]",
        (f"{CHAIN}::test_norm_and_sum_are_float64_of_the_same_numbers",),
        "what is summed is longer than what was clipped",
    ),
    Mutant(
        "chains/chain.cpp",
        "store(to, load(to) + sums[p][j], V);",
        "store(to, sums[p][j], V);",
        (f"{CHAIN}::test_logits_and_gradients_are_those_of_pytorch",),
        "positions that overlap overwrite each other",
    ),
    Mutant(
        "chains/chain.cpp",
        "const float* rows = work + example * views * ROW;",
        "const float* rows = work + (example & ~1) * views * ROW;",
        (f"{CHAIN}::test_a_row_has_the_same_bits_in_every_batch_and_place",),
        "an example's gradient uses the activations of another",
    ),
    Mutant(
        "chains/chain.cpp",
        "const int l = VECTORS - before - L;",
        "const int l = before;",
        (f"{CHAIN}::test_the_bits_depend_neither_on_the_vectors_of_the_processor_nor_on_the_optimizer",),
        "the bits depend on the width of a vector",
    ),
    Mutant(
        "gradients/compiled.py",
        "clip.factors(norms)[some]",
        "clip.factors(norms)[: len(gradients)]",
        (f"{CHAIN}::test_many_examples_are_summed_in_order_whatever_fits_at_a_time",),
        "examples are scaled by the factors of others",
    ),
    Mutant(
        "gradients/compiled.py",
        "return plain and same and",
        "return plain and",
        (f"{CHAIN}::test_a_model_that_changes_later_goes_to_the_other_engine",),
        "a changed model is differentiated as it was",
    ),
    Mutant(
        "chains/build.py",
        "definition, _target(tuple(compiler))]",
        "definition]",
        (f"{BUILD}::test_another_processor_or_compiler_has_its_own_library",),
        "a processor runs instructions that it does not have",
    ),
    Mutant(
        "chains/build.py",
        "return None if others_write or",
        "return None if",
        (f"{BUILD}::test_a_cache_that_others_can_write_is_not_used",),
        "other users can run their code in the process that holds the key",
    ),
    Mutant(
        "training/engines.py",
        "if asked == AUTO and was_measured(before):",
        "if False:",
        (f"{ENGINE}::test_a_machine_that_cannot_repeat_it_says_so_in_one_line",),
        "a resumed run silently changes its rounding errors",
    ),
    Mutant(
        "gradients/choose.py",
        "            if _disagreement(engine, model, loss, input_shape) is None\n        }",
        "        }",
        (f"{ENGINE}::test_auto_does_not_use_machine_code_that_disagrees",),
        "machine code is used unchecked",
    ),
    Mutant(
        "chains/sums.cpp",
        "if (factor != 0.0)",
        "if (true)",
        (f"{SUMS}::test_a_factor_of_zero_leaves_a_record_out",),
        "0 * inf: one record turns the sum of large gradients into NaN",
    ),
    Mutant(
        "chains/sums.cpp",
        "for (; k < size; k++) sum += (double)gradient[k] * (double)gradient[k];",
        "for (; k < size; k++) sum += 0.0;",
        (f"{SUMS}::test_norms_and_sums_are_those_of_float64",),
        "the last entries of a gradient are summed but not clipped",
    ),
    Mutant(
        "chains/sums.py",
        "return code if code is not None and _agrees(code) else None",
        "return code",
        (f"{SUMS}::test_code_that_computes_something_else_is_not_used",),
        "a compiler that is wrong decides the clip factors",
    ),
    Mutant(
        "gradients/parts.py",
        "squares.append(code.squares(row))",
        "squares.append(code.squares(kept[0]))",
        ("tests/gradients/test_deferred.py::test_formed_gradients_have_the_norms_of_what_is_summed",),
        "an example is clipped by the norm of another",
    ),
    Mutant(
        "gradients/choose.py",
        "return (engine, *(Layerwise(checkpointing, engine.arithmetic) for _ in range(workers - 1)))",
        "return (engine, *(Layerwise(checkpointing) for _ in range(workers - 1)))",
        (f"{ENGINE}::test_auto_takes_the_fastest_arithmetic_of_a_long_run_with_large_weights",),
        "the bits of a gradient depend on the worker that computes it",
    ),
]

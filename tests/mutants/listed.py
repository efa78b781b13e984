"""Hand-made faults of the files that the promises stand on, each with the tests that must notice it (D15).

Every one is a mistake someone has made, or could make in an afternoon: the authors' swapped axes, a batch-size divisor, noise
of the wrong scale, a condition that is not looked at. `python -m tests.mutants.run` applies them one at a time to a copy.
"""

from tests.mutants.mutant import Mutant as Mutant
from tests.mutants.wider import WIDER

CLIPPING, LEDGER = "tests/privacy/test_clipping.py", "tests/privacy/test_ledger.py"
NOISE, SAMPLING = "tests/statistical/test_noise.py", "tests/statistical/test_sampling.py"
ACCOUNTING, MECHANISM = "tests/privacy/test_accounting.py", "tests/privacy/test_mechanism.py"
STATEMENT, HONEST = "tests/privacy/test_statement.py", "tests/privacy/test_honest_printing.py"
ENGINES, DEGENERATE = "tests/contracts/test_engines.py", "tests/training/test_degenerate.py"
STEP, STATE, LOOP = "tests/training/test_step.py", "tests/training/test_state.py", "tests/training/test_loop.py"
LOSSES, SMOOTHADV = "tests/test_losses.py", "tests/views/test_smoothadv.py"
BOUNDS, SMOOTH = "tests/certification/test_bounds.py", "tests/certification/test_smooth.py"
SWEEP, SEQUENCE = "tests/certification/test_sweep.py", "tests/statistical/test_sequence.py"
ONE_POINT = f"{ACCOUNTING}::test_between_the_optimistic_and_the_pessimistic_bound[0.7-0.01-100-1e-05]"

MUTANTS = [
    # clipping
    Mutant(
        "privacy/clipping.py",
        "ROUNDING_MARGIN = 1.0 - 2.0**-20",
        "ROUNDING_MARGIN = 1.0 + 2.0**-20",
        (f"{CLIPPING}::test_the_clipped_norm_is_at_most_the_sensitivity",),
        "a clipped gradient is longer than C by its rounding",
    ),
    Mutant(
        "privacy/clipping.py",
        "return torch.where(torch.isfinite(norms), factors, torch.zeros_like(factors))",
        "return factors",
        (f"{CLIPPING}::test_a_norm_that_is_not_finite_gets_nothing",),
        "one record of NaN turns the model into NaN",
    ),
    Mutant(
        "privacy/clipping.py",
        "ROUNDING_MARGIN / (norms + self.r / (norms + self.r))",
        "ROUNDING_MARGIN / (norms - self.r / (norms + self.r))",
        (f"{CLIPPING}::test_the_clipped_norm_is_at_most_the_sensitivity",),
        "PSAC with a wrong sign has no bound",
    ),
    Mutant(
        "privacy/clipping.py",
        "return math.inf",
        "return clip_norm",
        (f"{CLIPPING}::test_no_clip_has_no_bound",),
        "an unclipped sum claims to be bounded",
    ),
    # noise
    Mutant(
        "privacy/noise.py",
        "(noise_multiplier * bounded.sensitivity) * noise",
        "noise_multiplier * noise",
        (f"{NOISE}::test_add_scales_by_the_sensitivity_of_the_value",),
        "noise that does not follow the clip norm",
    ),
    Mutant(
        "privacy/noise.py",
        "radius * np.sin(angle)",
        "radius * np.cos(angle)",
        (f"{NOISE}::test_no_correlation_between_parameters_or_steps",),
        "half of the noise is the other half again",
    ),
    Mutant(
        "privacy/noise.py",
        "uniform_words(key, Purpose.DP_NOISE, 2 * pairs, step)",
        "uniform_words(key, Purpose.DP_NOISE, 2 * pairs, 0)",
        (f"{NOISE}::test_no_correlation_between_parameters_or_steps",),
        "the same noise in every step cancels in differences",
    ),
    Mutant(
        "privacy/noise.py",
        "np.log((words[:pairs] + 1.0) * 2.0**-64)",
        "np.log(np.maximum((words[:pairs] + 1.0) * 2.0**-64, 2.0**-24))",
        (f"{NOISE}::test_tail_reaches_beyond_eight_and_a_half",),
        "a capped tail breaks delta",
    ),
    # sampling
    Mutant(
        "privacy/sampling.py",
        "np.flatnonzero(words < np.uint64(threshold))",
        "np.sort(np.argsort(words)[: round(records * sampling_probability)])",
        (f"{SAMPLING}::test_the_sampler_is_poisson_and_the_twins_are_not",),
        "batches of a fixed size are not what was accounted for",
    ),
    Mutant(
        "privacy/sampling.py",
        "uniform_words(key, Purpose.SAMPLING, records, step)",
        "uniform_words(key, Purpose.SAMPLING, records, step // 2)",
        (f"{SAMPLING}::test_the_sampler_is_poisson_and_the_twins_are_not",),
        "each batch is drawn twice: no amplification by sampling",
    ),
    # accounting
    Mutant(
        "privacy/accounting.py",
        "merged[setting] = merged.get(setting, 0) + event.steps",
        "merged[setting] = event.steps",
        (f"{ACCOUNTING}::test_events_of_different_settings_compose",),
        "only the last block is charged",
    ),
    Mutant(
        "privacy/accounting.py",
        "sampling_prob=sampling_probability, value",
        "sampling_prob=sampling_probability / 2, value",
        (ONE_POINT,),
        "a sampling rate that is not the one used",
    ),
    Mutant(
        "privacy/accounting.py",
        "_one_step(rho, q, interval).self_compose(steps)",
        "_one_step(rho, q, interval).self_compose(max(1, steps // 2))",
        (ONE_POINT,),
        "half of the steps are counted",
    ),
    Mutant(
        "privacy/accounting.py",
        "aim = wide_aim = epsilon * (1.0 - CALIBRATION_TOLERANCE)",
        "aim = wide_aim = epsilon * 1.02",
        (f"{ACCOUNTING}::test_calibration_never_passes_the_target_and_uses_it[1.0-1e-05-1.0-1]",),
        "calibration passes the budget",
    ),
    # mechanism
    Mutant(
        "privacy/mechanism.py",
        "self.key, step) / phase.batch_size",
        "self.key, step) / max(1, len(clipped.norms))",
        (f"{MECHANISM}::test_the_divisor_is_the_expected_batch_size",),
        "the size of the batch drawn is private",
    ),
    Mutant(
        "privacy/mechanism.py",
        "if step >= self.ledger.steps_authorised:\n            raise BudgetError",
        "if step < 0:\n            raise BudgetError",
        (f"{MECHANISM}::test_nothing_is_released_before_it_is_charged",),
        "a release that nobody charged",
    ),
    Mutant(
        "privacy/mechanism.py",
        '"secret" if noise_is_secret else "seeded"',
        '"secret"',
        (f"{LOOP}::test_a_known_noise_seed_is_not_private",),
        "a run with a known seed is called private",
    ),
    Mutant(
        "privacy/mechanism.py",
        "return self.batch_size / self.dataset_size",
        "return self.batch_size / self.dataset_size / 2",
        (f"{STATEMENT}::test_the_opening_line_of_a_plan_makes_a_private_statement",),
        "a plan whose rate is not B / N",
    ),
    # ledger
    Mutant(
        "store/chain.py",
        'entry["previous"] != head or digest != digest_of(head, event)',
        'entry["previous"] != head',
        (f"{LEDGER}::test_every_changed_byte_is_seen", f"{LEDGER}::test_without_the_key_all_but_the_macs_are_checked"),
        "an event can be edited",
    ),
    Mutant(
        "privacy/ledger.py",
        'if not hmac.compare_digest(mac, str(entry.get("mac", ""))):',
        'if "mac" in entry and not hmac.compare_digest(mac, str(entry["mac"])):',
        (f"{LEDGER}::test_a_line_without_an_hmac_is_refused_while_the_key_lives",),
        "who leaves the HMAC out can extend the chain",
    ),
    Mutant(
        "privacy/ledger.py",
        "if first_step != self.steps_authorised or steps < 1:",
        "if steps < 1:",
        (f"{LEDGER}::test_steps_are_authorised_in_order_and_never_after_the_end",),
        "a block is charged twice or left out",
    ),
    Mutant(
        "privacy/ledger.py",
        'in_order = not self.is_closed and event["first_step"]',
        'in_order = event["first_step"]',
        (f"{LEDGER}::test_nothing_follows_the_end",),
        "steps after the end of a run are read",
    ),
    # statement
    Mutant(
        "privacy/statement.py",
        'not Poisson": facts["sampling"] == "poisson"',
        'not Poisson": True',
        (f"{HONEST}::test_a_finite_epsilon_only_if_all_five_hold",),
        "epsilon of Poisson sampling for shuffled batches",
    ),
    Mutant(
        "privacy/statement.py",
        'facts["noise_source"] == "secret"',
        'facts["noise_source"] != "unknown"',
        (f"{HONEST}::test_a_finite_epsilon_only_if_all_five_hold",),
        "a finite epsilon although the noise can be subtracted",
    ),
    Mutant(
        "privacy/statement.py",
        "all(release.noise_multiplier > 0 for release in releases)",
        "any(release.noise_multiplier > 0 for release in releases)",
        (f"{HONEST}::test_no_noise_anywhere_is_no_promise",),
        "one block without noise is enough to lose everything",
    ),
    Mutant(
        "privacy/statement.py",
        "epsilon = {ceil_text(self.epsilon, 4)}",
        "epsilon = {self.epsilon - 1e-4:.4f}",
        (f"{STATEMENT}::test_the_printed_epsilon_is_rounded_up",),
        "less is printed than was spent",
    ),
    # gradients
    Mutant(
        "gradients/engine.py",
        "flat = [torch.where(torch.isfinite(norms)[:, None], gradient, 0.0) for gradient in flat]",
        "flat = list(flat)",
        (f"{DEGENERATE}::test_a_record_whose_gradient_is_not_finite_contributes_nothing[dpsgd-vmap]",),
        "0 * inf is NaN",
    ),
    Mutant(
        "gradients/engine.py",
        "[factors @ gradient.double() for gradient in flat]",
        "[(factors.float() @ gradient).double() for gradient in flat]",
        (f"{ENGINES}::test_norms_and_sums_are_float64",),
        "float32 sums move by more than C",
    ),
    Mutant(
        "gradients/engine.py",
        "return ClippedSum(self.value + other.value, worst",
        "return ClippedSum(other.value, worst",
        (f"{ENGINES}::test_parts_add_up_to_the_whole",),
        "a part of the batch is lost",
    ),
    Mutant(
        "gradients/layerwise.py",
        "vmap(loss)(torch.unflatten(logits, 0, views.shape[:2]), labels)",
        "vmap(loss)(torch.unflatten(logits, 0, (views.shape[1], views.shape[0])).transpose(0, 1), labels)",
        (f"{ENGINES}::test_isolation_no_other_gradient_changes",),
        "the authors' swapped axes: records share rows",
    ),
    Mutant(
        "gradients/layerwise.py",
        "parts = [part.without(unusable) for part in parts]",
        "parts = list(parts)",
        (f"{DEGENERATE}::test_a_record_whose_gradient_is_not_finite_contributes_nothing[dpsgd-layerwise]",),
        "0 * inf is NaN",
    ),
    Mutant(
        "gradients/layerwise.py",
        "norms[some] = squares.sum(dim=0).sqrt_()",
        "norms[some] = squares.amax(dim=0).sqrt_()",
        (f"{ENGINES}::test_equals_one_example_at_a_time",),
        "each layer clipped as if it were alone",
    ),
    Mutant(
        "gradients/parts.py",
        ".clamp_(min=0.0) + inputs.shape[1] * 2.0**-50 * sizes",
        ".clamp_(min=0.0)",
        (f"{ENGINES}::test_views_that_cancel_are_still_clipped_to_the_bound",),
        "the ghost norm loses its digits where views cancel",
    ),
    Mutant(
        "gradients/parts.py",
        "summed = summed + part.instantiate()",
        "summed = torch.maximum(summed, part.instantiate())",
        (f"{ENGINES}::test_equals_one_example_at_a_time",),
        "a layer used twice counts once",
    ),
    # step and state
    Mutant(
        "training/step.py",
        "context.mechanism.sample(len(context.images), step)",
        "context.mechanism.sample(len(context.images), 0)",
        (f"{STEP}::test_several_steps_by_hand",),
        "the same batch in every step",
    ),
    Mutant(
        "training/step.py",
        "context.mechanism.release(clipped, step)",
        "context.mechanism.release(clipped, 0)",
        (f"{STEP}::test_several_steps_by_hand",),
        "the same noise in every step",
    ),
    Mutant(
        "training/step.py",
        "normal_at_positions(key, Purpose.VIEWS, part.start, part.start + part.size",
        "normal_at_positions(key, Purpose.VIEWS, 0, part.size",
        (f"{STEP}::test_several_steps_by_hand",),
        "parts of a batch share the noise of their views",
    ),
    Mutant(
        "training/step.py",
        "return clipped_sum(context, batch, step, rows // 2)",
        "return total",
        (f"{LOOP}::test_a_physical_batch_that_does_not_fit_is_halved",),
        "what did not fit in memory is left out",
    ),
    Mutant(
        "training/step.py",
        "alike = alike and torch.equal(before[others], views(model, other, labels, noise)[others])",
        "alike = alike and True",
        (f"{SMOOTHADV}::test_twins_are_refused_before_training",),
        "views that mix examples are let in",
    ),
    Mutant(
        "training/step.py",
        "if type(views) in VIEWS.values():",
        "if True:",
        ("tests/contracts/test_mixing.py::test_views_and_clip_rules_of_the_users_own_keep_the_bound",),
        "views of the user's own see the whole batch",
    ),
    Mutant(
        "gradients/engine.py",
        "factors.clamp(-largest, largest), 0.0)",
        "factors, 0.0)",
        ("tests/contracts/test_mixing.py::test_views_and_clip_rules_of_the_users_own_keep_the_bound",),
        "a clip rule of the user's own passes the bound it states",
    ),
    Mutant(
        "isolation.py",
        "with torch.set_grad_enabled(not voting):",
        "with torch.no_grad():",
        ("tests/contracts/test_mixing.py::test_a_model_that_remembers_only_while_gradients_are_taken_is_refused",),
        "a model that remembers only in training is let in",
    ),
    Mutant(
        "known_layers.py",
        "return replaced or not plain or any(",
        "return not plain or any(",
        ("tests/contracts/test_mixing.py::test_votes_of_a_layer_with_a_replaced_method_are_refused",),
        "a layer whose method was replaced counts as known",
    ),
    Mutant(
        "training/state.py",
        "for tensor in (images, labels):",
        "for tensor in (images,):",
        (f"{STATE}::test_the_identity_of_the_data_covers_images_labels_and_shapes",),
        "a run goes on with other labels: a second release",
    ),
    Mutant(
        "training/state.py",
        "if sha256 is not None and sha256_hex(data) != sha256:",
        "if sha256 is None:",
        (f"{STATE}::test_a_damaged_checkpoint_is_refused",),
        "a damaged checkpoint is continued",
    ),
    Mutant(
        "store/weights.py",
        "if stated != digest_of_tensors(data, facts):",
        "if stated is None:",
        (f"{STATE}::test_every_changed_bit_of_a_model_is_seen",),
        "weights that no ledger stands behind",
    ),
    # losses and views
    Mutant(
        "losses.py",
        "F.log_softmax(logits, dim=1), 0.0).sum(dim=1).mean()",
        "F.log_softmax(logits, dim=1), 0.0).sum(dim=1).sum()",
        (f"{LOSSES}::test_cross_entropy_is_the_mean_over_views",),
        "K + 1 times the gradient",
    ),
    Mutant(
        "losses.py",
        "divergence(log_f[0], log_f).mean()",
        "divergence(log_f[0].detach(), log_f).mean()",
        (f"{LOSSES}::test_stability_is_zero_for_view_zero_and_flows_through_both_sides",),
        "another loss than the paper's",
    ),
    Mutant(
        "losses.py",
        "torch.where(p_y > others.amax(), hinge, 0.0)",
        "hinge",
        (f"{LOSSES}::test_one_class_certain",),
        "MACER's hinge where the prediction is wrong",
    ),
    Mutant(
        "views/gaussian.py",
        "noise, alpha=self.sigma)",
        "noise, alpha=self.sigma).clamp(0.0, 1.0)",
        (f"{STEP}::test_several_steps_by_hand",),
        "clamped noise is not the noise of the certificate",
    ),
    Mutant(
        "views/smoothadv.py",
        "torch.clamp(radius / _length(offset), max=1.0)",
        "torch.clamp(radius / _length(offset), min=1.0)",
        (f"{SMOOTHADV}::test_stays_in_the_ball_and_in_the_pixel_range",),
        "the attack leaves its ball",
    ),
    Mutant(
        "views/smoothadv.py",
        "vmap(loss_of_one)(logits, labels).sum()",
        "vmap(loss_of_one)(logits, labels.roll(1)).sum()",
        (f"{SMOOTHADV}::test_no_example_moves_the_view_of_another",),
        "the authors' shifted perturbation",
    ),
    # certification
    Mutant(
        "certification/bounds.py",
        "beta.ppf(alpha, successes",
        "beta.ppf(2 * alpha, successes",
        (f"{BOUNDS}::test_coverage_is_exact",),
        "twice as many false certificates as stated",
    ),
    Mutant(
        "certification/bounds.py",
        "trials - successes + 1))",
        "trials - successes + 0.5))",
        (f"{BOUNDS}::test_coverage_is_exact",),
        "not Clopper and Pearson's bound",
    ),
    Mutant(
        "certification/bounds.py",
        "if p_lower > 0.5 else 0.0",
        "if p_lower > 0.0 else 0.0",
        (f"{BOUNDS}::test_edges",),
        "a radius below one half",
    ),
    Mutant(
        "certification/smooth.py",
        "count = int(counter.count(x, 0, n, Purpose.CERTIFY_ESTIMATION, index)[selected])",
        "count = int(counter.count(x, 0, n, Purpose.CERTIFY_SELECTION, index)[selected])",
        (f"{SMOOTH}::test_each_question_asks_for_its_own_noise",),
        "the votes that chose the class also prove it",
    ),
    Mutant(
        "certification/smooth.py",
        "return first if top_two_differ(int(votes[first]), int(votes[second]), alpha) else ABSTAIN",
        "return first",
        (f"{SMOOTH}::test_predict_answers_or_abstains",),
        "an answer by the toss of a coin",
    ),
    Mutant(
        "certification/smooth.py",
        "if log_evidence_above(wins, cast, threshold) >= enough:",
        "if log_evidence_above(wins, cast, threshold) >= 0.5 * enough:",
        (f"{SMOOTH}::test_robust_needs_the_evidence_of_its_alpha",),
        "alpha becomes its square root",
    ),
    Mutant(
        "certification/votes.py",
        "> TIE_TOLERANCE * logits.abs().amax(dim=1)",
        ">= 0.0 * logits.abs().amax(dim=1)",
        (f"{SMOOTH}::test_ties_and_nans_count_for_nobody",),
        "ties are votes",
    ),
    Mutant(
        "certification/votes.py",
        "self.device, index, ROWS_ON_CPU",
        "self.device, 0, ROWS_ON_CPU",
        (f"{SMOOTH}::test_the_noise_of_selection_and_estimation_differs",),
        "fresh noise is not fresh",
    ),
    Mutant(
        "certification/sequence.py",
        "_log_mixture(a, b, tail, threshold) - math.log1p(-threshold)",
        "_log_mixture(a, b, tail, threshold) - 2 * math.log1p(-threshold)",
        (f"{SEQUENCE}::test_the_evidence_is_a_martingale_at_the_threshold",),
        "evidence that does not start at 1",
    ),
    Mutant(
        "certification/metrics.py",
        "return correct & (radius >= at)",
        "return radius >= at",
        (f"{SMOOTH}::test_figures_of_certificates",),
        "wrong predictions count as certified",
    ),
    Mutant(
        "certification/metrics.py",
        "return np.where(correct, radius, 0.0)",
        "return radius",
        (f"{SMOOTH}::test_figures_of_certificates",),
        "an ACR of wrong predictions",
    ),
    Mutant(
        "certification/metrics.py",
        "return [place * size // examples for place in range(examples)]",
        "return [place * (size // examples) for place in range(examples)]",
        (f"{SWEEP}::test_even_subset",),
        "the first images of a file that may be sorted",
    ),
    Mutant(
        "certification/metrics.py",
        "low = min(low, (1.0 - missed) * mean + missed * bounds[0])",
        "low = low",
        ("tests/certification/test_metrics.py::test_equal_radii_leave_an_interval",),
        "an interval without width",
    ),
    Mutant(
        "certification/sweep.py",
        "only_if = label if self.skip_misclassified else None",
        "only_if = label",
        (f"{SWEEP}::test_skipping_misclassified_examples_keeps_every_figure",),
        "labels are looked at without being asked for",
    ),
    Mutant(
        "certification/sweep.py",
        "c.radius, int(c.predict == label), seconds",
        "c.radius, int(c.predict != label), seconds",
        (f"{SWEEP}::test_rows_agree_with_the_tensors_of_the_python_call",),
        "right and wrong exchanged in the rows",
    ),
    *WIDER,
]

"""Hand-made faults of the prior systems: noise inside, its law, the norm of its layer, and noise weights that are charged."""

from tests.mutants.mutant import Mutant

LAWS, NORM, NOISY = "tests/certification/test_laws.py", "tests/test_operator_norm.py", "tests/models/test_noisy.py"
PRIOR_SYSTEMS, SYSTEMS = "tests/contracts/test_prior_systems.py", "tests/models/test_systems.py"
NOISE_WEIGHTS, ATTACKS = "tests/training/test_noise_weights.py", "tests/runs/test_prior_attacks.py"

PRIOR = [
    Mutant(
        "models/systems.py",
        "return (1.0 - _FLOOR) * shares + _FLOOR / len(channels)",
        "return shares",
        (f"{NOISE_WEIGHTS}::test_weights_are_floored_and_sum_to_one_whatever_the_noise",),
        "a channel may have no noise at all",
    ),
    Mutant(
        "models/systems.py",
        "model.scales.copy_(worth * operator_norm(model.first, shape, relative) * relative)",
        "model.scales.copy_(worth * relative)",
        (f"{NOISE_WEIGHTS}::test_other_weights_change_the_shares_of_the_noise_and_not_its_worth",),
        "noise after a pretrained stem is scaled as if its norm were 1",
    ),
    Mutant(
        "models/systems.py",
        "return nn.AvgPool2d(",
        "return nn.MaxPool2d(",
        (f"{SYSTEMS}::test_a_maximum_over_noisy_values_becomes_a_mean",),
        "a maximum finds the noise",
    ),
    Mutant(
        "models/noisy.py",
        "return (sigma * torch.sqrt(len(r) * r)).float()",
        "return (sigma * len(r) * r).float()",
        (f"{NOISY}::test_weights_of_the_noise",),
        "weights of variances are taken for weights of standard deviations",
    ),
    Mutant(
        "models/noisy.py",
        "kernel = normalized_kernel(weight, self.scales, self.geometry) if self.normalize else weight.clone()",
        "kernel = weight.clone()",
        (f"{NOISY}::test_a_folded_model_is_the_same_function",),
        "the model that votes is not normalized",
    ),
    Mutant(
        "models/noisy.py",
        "torch.unflatten(noise, 1, self.hidden_shape) * self._spread(self.scales)",
        "torch.unflatten(noise, 1, self.hidden_shape)",
        (f"{NOISY}::test_the_formula",),
        "training has noise of standard deviation 1 whatever the law says",
    ),
    Mutant(
        "models/noisy.py",
        "if altered(self.first) or geometry_of(",
        "if geometry_of(",
        (f"{LAWS}::test_a_subclass_or_a_hook_finds_no_way_around_the_noise",),
        "a hook on the noisy layer leads the image around the noise",
    ),
    Mutant(
        "certification/laws.py",
        "Context(prec=9, rounding=ROUND_CEILING)",
        'Context(prec=9, rounding="ROUND_FLOOR")',
        (f"{LAWS}::test_two_sites_add_in_quadrature",),
        "the stored norm is below the norm",
    ),
    Mutant(
        "operator_norm.py",
        "return tuple(d * (k - 1) for d, k",
        "return tuple(k - 1 for d, k",
        (f"{NORM}::test_padding_called_same_counts_the_dilation",),
        "the grid of a dilated kernel has no room for its padding",
    ),
    Mutant(
        "operator_norm.py",
        "for group in kernel.chunk(groups)]",
        "for group in kernel.chunk(groups)[:1]]",
        (f"{NORM}::test_the_bound_is_never_below_power_iteration",),
        "the norm of a grouped convolution is that of its first group",
    ),
    Mutant(
        "methods.py",
        'Row("inner", "none", "flat", "Phan et al. 2019',
        'Row("inneronce", "none", "flat", "Phan et al. 2019',
        (f"{PRIOR_SYSTEMS}::test_sound_systems_draw_fresh_noise_for_every_view",),
        "SecureSGD trains on one draw of noise, as its authors do",
    ),
    Mutant(
        "training/phases.py",
        "    return (release, *trained)",
        "    return trained",
        (f"{NOISE_WEIGHTS}::test_both_phases_are_charged_and_composed",),
        "the release of noise weights is not in the plan",
    ),
    Mutant(
        "training/phases.py",
        "    elif method.clip_rule.name in UNBOUNDED:",
        "    elif False:",
        (f"{NOISE_WEIGHTS}::test_a_method_without_a_guarantee_has_no_budget_to_charge",),
        "a run that is not private claims to charge its noise weights",
    ),
    Mutant(
        "training/loop.py",
        "world.from_first(lambda: mechanism.release(clipped, step), like=clipped.value)",
        "world.from_first(lambda: clipped.value / len(training.data.y_train), like=clipped.value)",
        (f"{NOISE_WEIGHTS}::test_the_scales_of_the_model_follow_from_the_noised_sum_and_nothing_else",),
        "noise weights are released without noise, and divided by the true number of records",
    ),
    Mutant(
        "training/loop.py",
        "    if begun.first > step:\n        return\n",
        "    if False:\n        return\n",
        (f"{NOISE_WEIGHTS}::test_a_run_killed_around_the_release_ends_in_the_same_bytes",),
        "a resumed run releases noise weights a second time, from trained weights",
    ),
    Mutant(
        "training/noise_weights.py",
        "FirstOnly(clip, present)",
        "clip",
        (f"{NOISE_WEIGHTS}::test_the_sum_over_many_parts_is_that_of_one",),
        "padding counts as records, so their number shows",
    ),
    Mutant(
        "training/noise_weights.py",
        "return of_channels(vmap(slope_of_one)(x, labels))",
        "return of_channels(vmap(slope_of_one)(x, labels[:1].expand(len(labels))))",
        (f"{NOISE_WEIGHTS}::test_the_vector_of_a_record_is_the_mean_gradient_of_each_channel",),
        "the label of one record enters the vectors of others",
    ),
    Mutant(
        "release/verify.py",
        "        noise_weights=config.model.noise_weights,\n",
        "        noise_weights=None,\n",
        (
            f"{NOISE_WEIGHTS}::test_both_phases_are_charged_and_composed",
            f"{NOISE_WEIGHTS}::test_a_twin_that_forgets_the_release_does_not_verify",
        ),
        "a run that forgot to charge its noise weights verifies",
    ),
    Mutant(
        "tuning/budget.py",
        "config.model.train, config.model.noise_weights)",
        "config.model.train)",
        (f"{NOISE_WEIGHTS}::test_a_charged_search_counts_the_release_of_every_trial",),
        "a charged search forgets the noise weights of its trials",
    ),
    Mutant(
        "runs/api.py",
        '"noise": None if model.system is None else model.noise_inside}',
        '"noise": model.noise}',
        (f"{ATTACKS}::test_the_config_states_the_noise_that_the_model_has",),
        "the config of a run states other noise than its model has",
    ),
]

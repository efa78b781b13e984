"""Hand-made faults over all of src: options, units, axes, orders, and what is written where (D15).

The first twelve follow an outside check of what the suite did not notice. The other 55 were chosen before any test was read;
the suite of that day did not notice 19 of them.
"""

from tests.mutants.mutant import Mutant

ANALYSIS = "tests/analysis/test_metrics.py"
ATTACKS = "tests/attacks/test_attacks.py"
AVERAGING = "tests/training/test_averaging.py"
AUDIT = "tests/privacy/test_audit.py"
AUDIT_COMMAND = "tests/cli/test_audit.py"
BANK = "tests/certification/test_bank.py"
CIFAR10 = "tests/paper/test_cifar10.py"
CLAIMS = "tests/paper/test_claims.py"
CLIPPING = "tests/privacy/test_clipping.py"
COMMANDS = "tests/cli/test_commands.py"
COMPARISON = "tests/paper/test_comparison.py"
CONFIG = "tests/runs/test_config.py"
CORRELATE = "tests/analysis/test_correlate.py"
CURVE = "tests/training/test_curve.py"
DURABLE = "tests/store/test_durable.py"
ENGINES = "tests/contracts/test_engines.py"
EXECUTORS = "tests/scale/test_executors.py"
EXPORT = "tests/release/test_export.py"
FIGURES = "tests/report/test_figures.py"
FINE_TUNED = "tests/report/test_fine_tuned.py"
ITEMS = "tests/data/test_items.py"
FIGURES_OF_ROWS = "tests/certification/test_metrics.py"
INPUT_GRADIENTS = "tests/test_input_gradients.py"
LAWS, PIXELDP = "tests/certification/test_laws.py", "tests/certification/test_pixeldp_bound.py"
NORM, NOISY = "tests/test_operator_norm.py", "tests/models/test_noisy.py"
INNER_NOISE = "tests/runs/test_inner_noise.py"
LOOP = "tests/training/test_loop.py"
LOSSES = "tests/test_losses.py"
METHODS = "tests/test_methods.py"
PRIOR_SYSTEMS = "tests/contracts/test_prior_systems.py"
MIXING = "tests/contracts/test_mixing.py"
PROOF, VISION = "tests/contracts/test_row_proof.py", "tests/contracts/test_vision.py"
OWN_RUN = "tests/runs/test_analyze_and_attack.py"
OPTIMIZERS = "tests/training/test_optimizers.py"
PAGE = "tests/report/test_page.py"
PARTS = "tests/training/test_parts.py"
PIECES = "tests/paper/test_pieces.py"
PRETRAIN = "tests/pretraining/test_pretrain.py"
PROVENANCE = "tests/training/test_provenance.py"
READERS = "tests/data/test_readers.py"
REGISTRY = "tests/models/test_registry.py"
REPRODUCTION = "tests/paper/test_reproduction.py"
RESUME_ALL = "tests/training/test_resume_all.py"
RNG = "tests/test_rng.py"
ROUNDING = "tests/test_rounding.py"
RUNNER = "tests/paper/test_runner.py"
SCHEDULES = "tests/training/test_schedules.py"
SECRETS = "tests/security/test_secrets.py"
SERVE, SERVE_TURNS = "tests/serve/test_service.py", "tests/serve/test_turns.py"
SERVE_LIMITS, SERVE_COMMAND = "tests/serve/test_limits.py", "tests/serve/test_command.py"
SESSION = "tests/scale/test_session.py"
SETTINGS = "tests/training/test_settings.py"
SMOOTH = "tests/certification/test_smooth.py"
SMOOTHADV = "tests/views/test_smoothadv.py"
STEP = "tests/training/test_step.py"
SWEEP = "tests/certification/test_sweep.py"
TABLES = "tests/report/test_tables.py"
TASKS = "tests/scale/test_tasks.py"
TRADE_OFF = "tests/privacy/test_tradeoff.py"
VERDICTS = "tests/paper/test_verdicts.py"
VERIFY = "tests/release/test_verify.py"

WIDER = [
    # found by an outside check
    Mutant(
        "privacy/clipping.py",
        "/ (norms + self.gamma)",
        "/ (norms + 0.01)",
        (f"{CLIPPING}::test_a_rule_uses_the_parameter_it_was_given",),
        "the rule clips with its default whatever gamma was asked for",
    ),
    Mutant(
        "losses.py",
        "replace(self, first_noisy=count - copies, copies=copies, sigma=float(sigma))",
        "replace(self, copies=copies, sigma=float(sigma))",
        (f"{LOSSES}::test_without_the_original_every_view_counts",),
        "without the original, MACER leaves a noisy view out",
    ),
    Mutant(
        "certification/smooth.py",
        "if log_evidence_below(wins, cast, threshold) >= enough:",
        "if log_evidence_below(wins, cast, threshold) >= 0.5 * enough:",
        (f"{SMOOTH}::test_neither_answer_comes_on_half_of_the_evidence",),
        "a no on half of the evidence: its alpha becomes the square root",
    ),
    Mutant(
        "training/step.py",
        "views_at(context.mechanism.plan.epochs_after(step))",
        "views_at(step)",
        (f"{STEP}::test_the_warm_up_of_an_attack_is_counted_in_epochs",),
        "a warm-up of ten epochs is over after ten steps",
    ),
    Mutant(
        "runs/analyze.py",
        "certificate, predict = certified.rows[index], int(metrics.predict[place])",
        "certificate, predict = list(certified.rows.values())[place - 1], int(metrics.predict[place])",
        (f"{OWN_RUN}::test_each_row_is_about_its_own_image",),
        "metrics stand beside the certificate of another image",
    ),
    Mutant(
        "runs/analyze.py",
        "[float(column[place]) for column in columns]",
        "[float(column[place - 1]) for column in columns]",
        (f"{OWN_RUN}::test_each_row_is_about_its_own_image",),
        "an image has the metrics of its neighbour",
    ),
    Mutant(
        "report/tables.py",
        "[(sample, rows[sample.idx]) for sample in self.samples if sample.idx in rows]",
        "list(zip(self.samples, rows.values(), strict=False))",
        (f"{TABLES}::test_samples_of_some_images_are_joined_by_their_index",),
        "the page joins metrics and certificates by place",
    ),
    Mutant(
        "paper/result_index.py",
        "[(row, earned[row.idx]) for row in self.facts.samples if row.idx in earned]",
        "list(zip(self.facts.samples, earned.values(), strict=False))",
        (f"{CLAIMS}::test_samples_are_joined_with_the_certificates_of_the_sigma_asked_for",),
        "the claims join metrics and certificates by place",
    ),
    Mutant(
        "release/verify.py",
        '_expect(plan["divisor"] == plan["batch_size"]',
        '_expect(plan["divisor"] > 0',
        (f"{VERIFY}::test_a_forgery_fails_the_check_that_names_it[another divisor than the batch size]",),
        "a divisor that is not the expected batch size passes the check",
    ),
    Mutant(
        "release/verify.py",
        '_expect(float(header["delta"]) == statement.delta',
        '_expect(float(header["delta"]) > 0',
        (f"{VERIFY}::test_a_forgery_fails_the_check_that_names_it[a smaller delta in the header]",),
        "the header may state any delta",
    ),
    Mutant(
        "release/certificates.py",
        "row.predict != row.label and row.radius == row.p_lower == 0.0",
        "row.predict != row.label",
        (f"{VERIFY}::test_a_row_whose_votes_were_not_cast_claims_nothing",),
        "rows without votes may claim a radius",
    ),
    Mutant(
        "store/durable.py",
        "_write_whole(descriptor, bytes(os.fstat(descriptor).st_size))",
        "pass",
        (f"{SECRETS}::test_a_key_is_overwritten_before_its_name_goes",),
        "the key's bytes stay on the disk",
    ),
    # data
    Mutant(
        "data/dataset.py",
        "self._public_size() - records if self.size_given else None",
        "self._public_size() if self.size_given else None",
        (f"{READERS}::test_the_first_records_are_held_out_for_validation",),
        "the public N still counts the held-out records: q is too small",
    ),
    Mutant(
        "data/cifar.py",
        "table[:, 1:].reshape(-1, 3, 32, 32), labels",
        "table[:, 1:].reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2), labels",
        (f"{READERS}::test_cifar_binary_is_read",),
        "colour planes are read as interleaved pixels",
    ),
    Mutant(
        "data/arrays.py",
        'order="F" if header.fortran else "C"',
        'order="C"',
        (f"{READERS}::test_an_array_in_column_order_holds_the_same_images",),
        "a Fortran-ordered array is read as if it were C-ordered",
    ),
    Mutant(
        "data/fetch.py",
        "[*([Path(given)] if given else []), cache_folder(), *system]",
        "[cache_folder(), *([Path(given)] if given else []), *system]",
        (f"{READERS}::test_the_folder_that_was_named_comes_before_the_cache",),
        "the cache wins over the folder that was named",
    ),
    Mutant(
        "data/registry.py",
        "contents[name] = fetch.check_digest(idx.read_bytes(path), source.digests[name], str(path))",
        "contents[name] = idx.read_bytes(path)",
        (f"{READERS}::test_missing_files_are_fetched_once_and_checked",),
        "a damaged file of a data set is trained on",
    ),
    # store
    Mutant(
        "store/metrics.py",
        'not _is_plain(alike), -entry["n"], entry["alpha"]',
        'not _is_plain(alike), entry["n"], entry["alpha"]',
        (f"{TABLES}::test_among_plain_ones_more_votes_come_first",),
        "a quick look takes the place of the large certification",
    ),
    Mutant(
        "store/growing.py",
        "return [[held[key] for key in wanted] for",
        "return [list(held.values()) for",
        (f"{SWEEP}::test_finished_rows_are_left_alone_and_more_examples_extend_them",),
        "rows nobody asked for count in the figures",
    ),
    Mutant(
        "store/records.py",
        "ceil_text(self.epsilon, 6)",
        "floor_text(self.epsilon, 6)",
        (f"{CURVE}::test_a_row_an_epoch_with_what_was_spent_and_reached",),
        "the curve prints less than was spent",
    ),
    Mutant(
        "store/durable.py",
        "if time.monotonic() - self._synced > self._seconds:",
        "if False:",
        (f"{DURABLE}::test_lines_are_made_durable_every_few_seconds_and_at_the_end",),
        "hours of rows are not on the disk before the last one",
    ),
    Mutant(
        "store/durable.py",
        "os.fchmod(descriptor, 0o700)",
        "pass",
        (f"{SECRETS}::test_key_files_are_for_their_owner_only",),
        "a private folder that was there already stays readable",
    ),
    # report
    Mutant(
        "paper/verdicts.py",
        "np.std(self.each, ddof=1)",
        "np.std(self.each, ddof=0)",
        (f"{VERDICTS}::test_several_seeds_have_a_spread_beside_the_error",),
        "the spread of three seeds is a fifth too small",
    ),
    Mutant(
        "paper/comparison.py",
        "[100 * low, 100 * high]",
        "[low, high]",
        (f"{COMPARISON}::test_the_papers_figure_stands_against_our_interval",),
        "shares are compared with per cents",
    ),
    Mutant(
        "report/tables.py",
        "[replace(sample, radius=row.radius, correct=row.correct) for sample, row in joined]",
        "[sample for sample, row in joined]",
        (f"{TABLES}::test_samples_stand_beside_the_main_certificates",),
        "metrics beside the radii of another certification",
    ),
    Mutant(
        "report/html.py",
        "if alike[0] == alike[1] else None",
        "if alike[0][0] == alike[1][0] else None",
        (f"{PAGE}::test_no_gain_where_it_would_not_be_one_of_the_models",),
        "radii of different alphas are compared",
    ),
    Mutant(
        "paper/claims.py",
        "order[max(0, place - 1) : place + 2]",
        "order[max(0, place - 1) : place + 1]",
        (f"{CLAIMS}::test_sweeps_can_fall",),
        "the right neighbour of a sweep is not looked at",
    ),
    Mutant(
        "report/figures.py",
        "axes.plot([0.25], [point.certified_accuracy]",
        "axes.plot([0.25], [point.clean_accuracy]",
        (f"{FIGURES}::test_the_certified_curve_is_drawn_from_the_rows",),
        "the paper's clean accuracy is drawn as its certified one",
    ),
    Mutant(
        "report/pictures.py",
        "return image + sigma * noise",
        "return image + noise",
        (f"{PAGE}::test_the_picture_is_the_test_image_and_the_noise_is_sigma",),
        "the picture shows another noise than the model sees",
    ),
    Mutant(
        "paper/reproduction.py",
        "epsilon, delta = (max(float(privacy[key])",
        "epsilon, delta = (min(float(privacy[key])",
        (f"{REPRODUCTION}::test_the_rules_and_the_largest_budget_stand_under_the_table",),
        "'at most' is the smallest epsilon of the table",
    ),
    Mutant(
        "paper/reproduction.py",
        "is_papers_model=dataset != CIFAR10",
        "is_papers_model=True",
        (f"{CIFAR10}::test_every_cell_is_shown_and_none_agrees",),
        "figures of another backbone agree with the paper's",
    ),
    Mutant(
        "paper/claims.py",
        "if dataset == CIFAR10:\n        return {value: None",
        "if not dataset:\n        return {value: None",
        (f"{CIFAR10}::test_our_run_is_not_a_line_of_the_papers_sweep",),
        "our backbone stands in the table of CrossViT's learning rates",
    ),
    Mutant(
        "report/figures.py",
        "(place, name_, run.main.voted)",
        "(place, name_, run.main)",
        (f"{FINE_TUNED}::test_images_without_votes_have_no_p_lower_and_no_radius_in_the_figures",),
        "images without votes are drawn at p_A = 0",
    ),
    # command line
    Mutant(
        "cli/account.py",
        "int(epochs * size / batch_size) if steps is None else steps",
        "round(epochs * size / batch_size) if steps is None else steps",
        (f"{COMMANDS}::test_account",),
        "account counts another number of steps than a training takes",
    ),
    Mutant(
        "cli/_options.py",
        "return chosen | dict(parse_assignment(text) for text in set_ or [])",
        "return dict(parse_assignment(text) for text in set_ or []) | chosen",
        (f"{COMMANDS}::test_set_is_the_last_word",),
        "--set is not the last word",
    ),
    Mutant(
        "cli/certify.py",
        "Request.under(run.smoothing(sigma), n0, n, alpha, fresh_noise, skips)",
        "Request.under(run.smoothing(sigma), n0, n, alpha, skips, fresh_noise)",
        (f"{COMMANDS}::test_robust_at_a_radius",),
        "two options are exchanged",
    ),
    Mutant(
        "cli/audit.py",
        "(0.99 if runs is None else 0.999)",
        "(0.999 if runs is None else 0.99)",
        (f"{AUDIT_COMMAND}::test_one_run_prints_bound_promise_ceiling_and_verdict",),
        "the confidence of one audit is that of the other",
    ),
    Mutant(
        "cli/attack.py",
        "steps=steps,\n        starts=starts,",
        "steps=starts,\n        starts=steps,",
        (f"{OWN_RUN}::test_wrong_requests_of_attack",),
        "--steps and --starts are exchanged",
    ),
    # analysis
    Mutant(
        "analysis/lipschitz.py",
        "change.abs().sum(dim=1) / distance",
        "change.abs().amax(dim=1) / distance",
        (f"{ANALYSIS}::test_lipschitz_of_a_linear_map_is_its_norm_from_linf_to_l1",),
        "the features are measured in another norm",
    ),
    Mutant(
        "analysis/correlate.py",
        "metric[radius < threshold], metric[radius >= threshold]",
        "metric[radius <= threshold], metric[radius > threshold]",
        (f"{CORRELATE}::test_bins_and_splits_hold_every_example_once",),
        "an image at the threshold counts as below it",
    ),
    Mutant(
        "analysis/input_hessian.py",
        "ends = values[:, [0, -1]].abs()",
        "ends = values[:, [0, -1]].clamp(min=0.0)",
        (f"{ANALYSIS}::test_hessian_norm_is_the_dense_one_on_50_examples",),
        "negative curvature is not seen",
    ),
    Mutant(
        "analysis/layers.py",
        'return f"input of {ran[-1]}"',
        'return f"input of {ran[0]}"',
        (f"{ANALYSIS}::test_the_layer_is_what_feeds_the_last_linear_one_or_the_one_named",),
        "features of the first linear layer, not of the last",
    ),
    # attacks
    Mutant(
        "attacks/measure.py",
        "part = _NOISE_PARTS + start * how.steps + number - 1",
        "part = _NOISE_PARTS + number - 1",
        (f"{ATTACKS}::test_every_step_of_every_start_sees_noises_of_its_own",),
        "every start of an attack sees the same noises",
    ),
    Mutant(
        "attacks/norms.py",
        "radius = strength * float(word * _UNIT) ** (1.0 / x.numel())",
        "radius = strength * float(word * _UNIT)",
        (f"{ATTACKS}::test_random_starts_are_uniform_in_their_balls",),
        "random starts huddle at the image",
    ),
    Mutant(
        "attacks/measure.py",
        "return bool(for_label > votes.max())",
        "return bool(for_label >= votes.max())",
        (f"{ATTACKS}::test_a_tie_is_not_right",),
        "a tie counts as right",
    ),
    # certification
    Mutant(
        "certification/bank.py",
        "device, part=block)",
        "device, part=0)",
        (f"{BANK}::test_votes_equal_those_of_the_plain_path[PyTorch-cnn]",),
        "every block of the bank is the first one again: 10,000 votes are 1,024",
    ),
    Mutant(
        "certification/metrics.py",
        "math.sqrt(len(values)) if len(values) > 1 else math.inf",
        "math.sqrt(len(values)) if len(values) > 1 else 0.0",
        (f"{FIGURES_OF_ROWS}::test_a_radius_is_never_negative_and_one_image_says_nothing_of_others",),
        "a single image is known exactly",
    ),
    Mutant(
        "certification/metrics.py",
        "range(int(4 * sigma / 0.25) + 1)",
        "range(int(4 * sigma / 0.25))",
        (f"{FIGURES_OF_ROWS}::test_radii_are_shown_every_quarter_up_to_four_sigma",),
        "the last radius is left out",
    ),
    # runs
    Mutant(
        "runs/config.py",
        "return self.certify.sigma if self.certify.sigma is not None else self.method.sigma",
        "return self.method.sigma",
        (f"{CONFIG}::test_certification_has_the_sigma_of_the_views_unless_one_is_given",),
        "certify.sigma is ignored",
    ),
    Mutant(
        "paper/pieces.py",
        'is_worth(entry, sigma, may_skip=skips) and entry["examples"] >= examples',
        "is_worth(entry, sigma, may_skip=skips)",
        (f"{PIECES}::test_too_few_examples_are_certified_further",),
        "fewer images than asked for are taken as done",
    ),
    Mutant(
        "paper/estimate.py",
        "return max(sum(each) / jobs, max(each, default=0.0))",
        "return sum(each) / jobs",
        (f"{PIECES}::test_estimates_follow_what_was_measured",),
        "a chain is shared between processes",
    ),
    Mutant(
        "runs/identity.py",
        "for values in (x, y):",
        "for values in (x,):",
        (f"{COMMANDS}::test_certificates_belong_to_their_images",),
        "rows are joined with other labels",
    ),
    Mutant(
        "runs/certify.py",
        "sum(row.robust == -1 for row in rows)",
        "sum(row.robust != 1 for row in rows)",
        (f"{OWN_RUN}::test_answers_at_a_radius_are_counted_by_kind",),
        "a clear no counts as undecided",
    ),
    Mutant(
        "runs/attack.py",
        'if row.attack != "pgd-l2" or certified is None',
        'if not row.attack.startswith("pgd") or certified is None',
        (f"{OWN_RUN}::test_certificates_in_l2_say_nothing_of_an_attack_in_another_norm",),
        "an L-inf attack is held against L2 certificates",
    ),
    Mutant(
        "runs/presets/__init__.py",
        '.get(f"{0.5 if sigma is None else sigma:g}", {})',
        '.get("0.5", {})',
        (f"{CONFIG}::test_a_preset_takes_the_settings_of_its_sigma",),
        "the settings of a sigma are those of 0.5",
    ),
    Mutant(
        "runs/api.py",
        "data.classes if data.classes_given else None,",
        "data.classes,",
        (f"{LOOP}::test_the_number_of_classes_is_said_to_be_public_unless_given",),
        "the statement no longer says that the classes were read off the data",
    ),
    # release
    Mutant(
        "release/export.py",
        'if entry.get("split", "test") == "test"]',
        "]",
        (f"{EXPORT}::test_held_out_records_are_left_out",),
        "figures of held-out records leave the house",
    ),
    Mutant(
        "store/public.py",
        "key_is_here=directory.key.exists()",
        "key_is_here=False",
        (f"{VERIFY}::test_a_forgery_fails_the_check_that_names_it[the key lies beside the run]",),
        "verify does not see a run key that lies there",
    ),
    Mutant(
        "release/verify.py",
        '"held_out": config.data.validation',
        '"held_out": plan["held_out"]',
        (f"{VERIFY}::test_a_forgery_fails_the_check_that_names_it[held-out records that the config does not name]",),
        "held-out records that the config does not name",
    ),
    # methods, and the parts they are made of
    Mutant(
        "views/smoothadv.py",
        "along, radius, 2 * radius / self.steps)",
        "along, radius, 2 * self.radius / self.steps)",
        (f"{SMOOTHADV}::test_on_the_way_up_it_is_the_same_attack_with_a_smaller_radius",),
        "the step of the attack is not ramped up",
    ),
    Mutant(
        "losses.py",
        "10.0 if sigma <= 0.25 else 5.0",
        "10.0 if sigma < 0.25 else 5.0",
        (f"{LOSSES}::test_consistency_takes_the_original_weight_of_its_sigma",),
        "another lambda at the original's own sigma",
    ),
    Mutant(
        "methods.py",
        '"dp-smoothadv+psac": Row("smoothadv", "none", "psac"',
        '"dp-smoothadv+psac": Row("smoothadv", "none", "flat"',
        (f"{METHODS}::test_the_docstring_shows_the_table_row_by_row",),
        "a method of the table clips another way than its name says",
    ),
    Mutant(
        "rounding.py",
        "Decimal(shortest).quantize",
        "Decimal(value).quantize",
        (f"{ROUNDING}::test_down_is_never_above_and_up_is_never_below",),
        "a radius loses a digit each time it is written again",
    ),
    Mutant(
        "rng.py",
        'f"dpcert/{domain}/{seed}"',
        'f"dpcert/{seed}"',
        (f"{RNG}::test_one_seed_gives_each_use_a_key_of_its_own",),
        "one seed gives training and certification the same key",
    ),
    Mutant(
        "gradients/layers.py",
        "[(amount // 2, amount - amount // 2) for amount in totals]",
        "[(amount - amount // 2, amount // 2) for amount in totals]",
        (f"{ENGINES}::test_equals_one_example_at_a_time[cross-entropy-grouped-layerwise]",),
        "padding 'same' of an even kernel on the wrong side",
    ),
    Mutant(
        "gradients/layers.py",
        "F.layer_norm(x, layer.normalized_shape, eps=layer.eps)",
        "F.layer_norm(x, layer.normalized_shape)",
        (f"{ENGINES}::test_equals_one_example_at_a_time[cross-entropy-own eps-layerwise]",),
        "the layer's own eps is ignored",
    ),
    Mutant(
        "training/curve.py",
        "tested = None if data.held_out else test_set.accuracy()",
        "tested = test_set.accuracy()",
        (f"{CURVE}::test_with_records_held_out_the_test_set_is_left_alone",),
        "the test set is looked at while settings are chosen",
    ),
    Mutant(
        "training/curve.py",
        "self._features = None\n            return",
        "return",
        ("tests/training/test_phases.py::test_features_of_the_test_set_do_not_outlive_the_head_phase",),
        "the test accuracy of later phases uses features of earlier weights",
    ),
    Mutant(
        "privacy/audit.py",
        "each = 1.0 - (1.0 - confidence) / 2.0",
        "each = confidence",
        (f"{AUDIT}::test_the_two_error_rates_share_the_risk",),
        "two bounds take the risk of one",
    ),
    Mutant(
        "models/spec.py",
        "enabled=seed is not None",
        "enabled=False",
        (f"{REGISTRY}::test_a_seeded_model_leaves_the_global_generator_alone",),
        "a seeded model reseeds the whole program",
    ),
    Mutant(
        "input_gradients.py",
        "(horizontal, horizontal + -width % s, vertical, vertical + -height % s)",
        "(vertical, vertical + -width % s, horizontal, horizontal + -height % s)",
        (f"{INPUT_GRADIENTS}::test_strided_convolutions_over_phases",),
        "padding of the two axes is exchanged",
    ),
    # the proof of custom forwards, and large gradients
    Mutant(
        "row_rules.py",
        "if not found or x.dim in found:",
        "if not found:",
        (f"{PROOF}::test_what_may_mix_has_no_proof",),
        "an operation along the batch counts as proved",
    ),
    Mutant(
        "row_rules.py",
        "if unknown or any(value is True or isinstance(value, BatchSize) for value in values):",
        "if unknown or any(value is True for value in values):",
        (f"{PROOF}::test_what_may_mix_has_no_proof",),
        "the number of rows is used as a number",
    ),
    Mutant(
        "row_rules.py",
        "            if entry != slice(None):",
        "            if type(entry) is int:",
        (f"{PROOF}::test_what_may_mix_has_no_proof",),
        "some rows may be taken out of the batch",
    ),
    Mutant(
        "row_rules.py",
        "if sizes == (SMALL, LARGE) and torch.Size(small[:place]).numel() == before:",
        "if sizes == (SMALL, LARGE):",
        (f"{PROOF}::test_what_may_mix_has_no_proof",),
        "rows are exchanged with columns",
    ),
    Mutant(
        "row_rules.py",
        "if len(places) != 1 or min(places) < 3 or dropout_p != 0.0:",
        "if len(places) != 1 or dropout_p != 0.0:",
        (f"{PROOF}::test_what_may_mix_has_no_proof",),
        "rows attend to each other",
    ),
    Mutant(
        "row_proof.py",
        "if altered(layer) or not plain:",
        "if not plain:",
        (f"{PROOF}::test_an_altered_model_has_no_proof",),
        "a layer with hooks counts as proved",
    ),
    Mutant(
        "gradients/sums.py",
        "factors = self._clip.factors(self._norms)[here]",
        "factors = self._clip.factors(self._norms[here])",
        (f"{VISION}::test_padding_counts_for_nothing_in_any_piece",),
        "padding counts as records in the later pieces of a part",
    ),
    Mutant(
        "gradients/parts.py",
        "return Formed(wide, norms.square())",
        "return Formed(wide, norms.square() / 4)",
        ("tests/gradients/test_deferred.py::test_formed_gradients_have_the_norms_of_what_is_summed",),
        "large gradients are clipped to twice the norm",
    ),
    Mutant(
        "gradients/sums.py",
        "torch.stack([stored, *formed]).sum(dim=0)",
        "torch.stack(formed).sum(dim=0)",
        ("tests/gradients/test_deferred.py::test_the_clipped_sum_is_that_of_the_reference_engine",),
        "large gradients are clipped as if they were alone",
    ),
    Mutant(
        "gradients/checkpointed.py",
        "split = any(low <= last < high for low, high in spans.values())",
        "split = False",
        ("tests/gradients/test_checkpointing.py::test_a_parameter_that_is_used_twice_stays_in_one_segment",),
        "a parameter's gradient is cut in two, and clipped twice",
    ),
    # isolation, part sizes, warm starts
    Mutant(
        "known_layers.py",
        "return dimensions - (last - layer.start_dim) if 1 <= layer.start_dim <= last else None",
        "return dimensions - (last - layer.start_dim) if 0 <= layer.start_dim <= last else None",
        (f"{MIXING}::test_what_is_not_known_is_not_proved",),
        "a chain that flattens the batch axis counts as proved",
    ),
    Mutant(
        "known_layers.py",
        "return replaced or not plain or any(getattr(layer, kind) for kind in _HOOKS)",
        "return bool(layer._forward_pre_hooks)",
        (f"{MIXING}::test_what_is_not_known_is_not_proved",),
        "a replaced forward or a hook does not undo the proof",
    ),
    Mutant(
        "known_layers.py",
        "bias in (None, (layer.out_features,))",
        "True",
        (f"{MIXING}::test_what_is_not_known_is_not_proved",),
        "a bias for each position of the batch counts as proved",
    ),
    Mutant(
        "gradients/layerwise.py",
        "whole_batch = keeps_rows_apart(model, tuple(views.shape[2:])) and not skeleton.without_rule",
        "whole_batch = not skeleton.without_rule",
        (f"{MIXING}::test_past_the_check_one_record_still_moves_the_sum_by_at_most_c",),
        "a custom forward runs on the whole batch",
    ),
    Mutant(
        "views/smoothadv.py",
        "uphill if keeps_rows_apart(model, tuple(x.shape[1:])) else uphill_of_each",
        "uphill",
        (f"{MIXING}::test_past_the_check_one_record_still_moves_the_sum_by_at_most_c",),
        "the attack runs a custom forward on the whole batch",
    ),
    Mutant(
        "certification/bank.py",
        "self._rows_together = keeps_rows_apart(model, input_shape) if proven is None else proven",
        "self._rows_together = True",
        (f"{MIXING}::test_a_cut_model_runs_each_row_alone",),
        "votes from a bank run a custom forward on many noisy inputs",
    ),
    Mutant(
        "gradients/engine.py",
        "factors[self.count :] = 0.0",
        "pass",
        (f"{STEP}::test_several_steps_by_hand",),
        "the padding of a part counts as examples",
    ),
    Mutant(
        "training/step.py",
        "parts.append(Part(start, min(start + size, total), size))",
        "parts.append(Part(start, min(start + size, total), min(size, total - start)))",
        (f"{PARTS}::test_every_part_has_one_of_two_sizes_whatever_the_batch",),
        "the last part is as large as there are records left",
    ),
    Mutant(
        "data/items.py",
        "floats[list(failed)] = torch.nan",
        "floats[list(failed)] = 0.5",
        (f"{ITEMS}::test_an_item_that_fails_after_the_check_contributes_zero",),
        "a record that cannot be read is trained on as a grey image",
    ),
    Mutant(
        "data/items.py",
        "digest_of(*record) != self.known.digests[numbers[place]].tobytes()",
        "record[0].shape != self.shape[1:]",
        (f"{ITEMS}::test_an_item_that_fails_after_the_check_contributes_zero",),
        "a record that changes: a repeated step is another release",
    ),
    Mutant(
        "data/ahead.py",
        "claimed = places.popleft()",
        "claimed = places[0][0], 0",
        (f"{ITEMS}::test_rows_read_ahead_are_those_asked_for_in_any_order",),
        "rows read ahead are mixed up",
    ),
    Mutant(
        "data/digests.py",
        'f"{pixels.dtype} {pixels.shape} {label} ".encode()',
        'f"{pixels.dtype} {pixels.shape} ".encode()',
        (f"{ITEMS}::test_a_run_is_resumed_with_the_same_items_only",),
        "a run goes on with other labels",
    ),
    Mutant(
        "training/loop.py",
        "as_in_steps(training.data.x_train)",
        "training.data.x_train",
        (f"{ITEMS}::test_a_head_phase_reads_like_the_steps",),
        "an exception of a head phase depends on one record",
    ),
    Mutant(
        "training/provenance.py",
        "if any(seen.releases is None for seen in again):",
        "if all(seen.releases is None for seen in history):",
        (f"{PROVENANCE}::test_an_earlier_training_that_was_not_private_is_never_outweighed",),
        "a private training hides one without privacy",
    ),
    Mutant(
        "training/provenance.py",
        "(*_history(model), Seen(_hashes(images), _charged(ledger)))",
        "(Seen(_hashes(images), _charged(ledger)),)",
        (f"{PROVENANCE}::test_the_same_cell_run_twice_is_charged_twice",),
        "a third training forgets the first",
    ),
    Mutant(
        "privacy/ledger.py",
        "yield from self.earlier",
        "yield from ()",
        (f"{PROVENANCE}::test_the_same_cell_run_twice_is_charged_twice",),
        "the accountant does not see what the initial weights had released",
    ),
    # pretraining
    Mutant(
        "pretraining/images.py",
        "return np.where(kind < CLEAN_SHARE, 0.0, drawn).astype(np.float32)",
        "return drawn.astype(np.float32)",
        (f"{PRETRAIN}::test_the_noise_law_is_the_one_on_the_card",),
        "no image is clean",
    ),
    Mutant(
        "pretraining/images.py",
        "keep = np.array([digest not in listed for digest in image_digests])",
        "keep = np.array([True for digest in image_digests])",
        (f"{PRETRAIN}::test_near_duplicates_of_cifar10_are_left_out",),
        "near-duplicates of the private set are trained on",
    ),
    Mutant(
        "pretraining/train.py",
        "model.head.bias.copy_(model.head.bias.double() + weight @ mean)",
        "pass",
        (f"{PRETRAIN}::test_standardizing_leaves_the_public_head_as_it_was",),
        "the public head is not adapted to the standardized features",
    ),
    # what epsilon means
    Mutant(
        "privacy/tradeoff.py",
        "few_alarms = np.exp(epsilons) * rates + deltas",
        "few_alarms = np.exp(epsilons) * rates",
        (f"{TRADE_OFF}::test_one_subsampled_step_against_the_best_test_of_two_distributions",),
        "the bound on membership attacks forgets delta",
    ),
    Mutant(
        "privacy/tradeoff.py",
        "1.0 - np.exp(-epsilons) * np.maximum(1.0 - deltas - rates, 0.0)",
        "1.0 - np.exp(epsilons) * np.maximum(1.0 - deltas - rates, 0.0)",
        (f"{TRADE_OFF}::test_the_closed_form_of_the_gaussian_mechanism",),
        "the bound at many false alarms has the wrong sign of epsilon",
    ),
    Mutant(
        "privacy/accounting.py",
        "np.maximum(*(_pmf_deltas(pmf, epsilons) for pmf in pmfs))",
        "np.minimum(*(_pmf_deltas(pmf, epsilons) for pmf in pmfs))",
        (f"{TRADE_OFF}::test_one_subsampled_step_against_the_best_test_of_two_distributions",),
        "the profile holds for one of adding and removing a record only",
    ),
    Mutant(
        "report/membership.py",
        'if not run.metrics["privacy"]["private"]:',
        "if False:",
        ("tests/report/test_membership.py::test_a_page_never_promises_what_the_ledger_does_not_prove",),
        "a page bounds attacks on a run that it calls not private",
    ),
    # settings, optimizers, schedules, averages
    Mutant(
        "training/optimizers.py",
        "lr=keys.learning_rate, weight_decay=keys.weight_decay)",
        "lr=keys.learning_rate, weight_decay=0.01)",
        (f"{OPTIMIZERS}::test_an_optimizer_is_pytorchs_on_the_same_noised_gradients",),
        "the weight decay that was asked for is ignored",
    ),
    Mutant(
        "training/schedules.py",
        "((step - rising) / (steps - rising))",
        "(step / steps)",
        (f"{SCHEDULES}::test_schedules_are_pytorchs",),
        "the learning rate falls before the warm-up is over",
    ),
    Mutant(
        "training/schedules.py",
        "return (step + 1) / rising",
        "return step / rising",
        (f"{SCHEDULES}::test_a_rate_is_positive_rises_in_the_warm_up_and_never_after_it",),
        "the first step is paid for and does nothing",
    ),
    Mutant(
        "training/loop.py",
        "keys.learning_rate_at(step - start, count)",
        "keys.learning_rate_at(step - begun.first, count)",
        (f"{RESUME_ALL}::test_a_run_that_was_killed_at_several_steps_ends_in_the_same_bytes",),
        "a resumed run begins its schedule again",
    ),
    Mutant(
        "training/loop.py",
        "        training.average.release()\n    statement",
        "        pass\n    training.average.release()\n    statement",
        (f"{AVERAGING}::test_averaged_weights_are_known_to_have_seen_the_records",),
        "released averages are taken for weights that have seen nothing",
    ),
    Mutant(
        "training/loop.py",
        "training.average.include(done - start)",
        "training.average.include(step - start)",
        (f"{AVERAGING}::test_the_released_weights_are_the_average_of_the_iterates",),
        "an average is counted from the wrong step",
    ),
    Mutant(
        "training/averaging.py",
        "before = steps - max(1, round(keys.tail * steps))",
        "before = 0",
        (f"{AVERAGING}::test_the_released_weights_are_the_average_of_the_iterates",),
        "the tail average is that of all steps",
    ),
    Mutant(
        "training/averaging.py",
        "self._put(raw)",
        "pass",
        (f"{AVERAGING}::test_the_raw_weights_come_back_bit_for_bit_and_buffers_are_left_alone",),
        "the training goes on from the average after each look at the test set",
    ),
    Mutant(
        "training/state.py",
        "        value.copy_(stored[name])",
        "        value.copy_(value)",
        (f"{RESUME_ALL}::test_a_run_that_was_killed_at_several_steps_ends_in_the_same_bytes",),
        "a resumed run forgets its average",
    ),
    Mutant(
        "training/lifecycle.py",
        "facts |= {} if averaging is None else",
        "facts |= {} if averaging is not None else",
        (f"{AVERAGING}::test_the_average_is_what_is_written_evaluated_and_loaded",),
        "the header does not say that the weights are an average",
    ),
    Mutant(
        "training/settings.py",
        "Annotated[int | None, Field(ge=1, le=1024), SPEED_ONLY]",
        "Annotated[int | None, Field(ge=1, le=1024)]",
        (f"{SETTINGS}::test_every_key_belongs_to_one_section_and_python_knows_all_of_them",),
        "a run cannot be resumed with another number of threads",
    ),
    Mutant(
        "sections.py",
        "if value is not None and chosen is not None:",
        "if False:",
        (f"{SETTINGS}::test_a_wrong_value_is_one_line_and_nothing_is_written",),
        "a setting that nothing uses is accepted in silence",
    ),
    Mutant(
        "sections.py",
        "if key not in unset}",
        "}",
        (f"{SETTINGS}::test_the_papers_presets_and_the_stored_configs_keep_their_bytes",),
        "runs without the new keys get another config, and another hash of it",
    ),
    Mutant(
        "release/verify.py",
        '"averaging": config.train.averaging_in_words',
        '"averaging": evidence.header.get("averaging")',
        (f"{AVERAGING}::test_an_averaged_run_verifies_and_a_header_of_another_averaging_does_not",),
        "a header may claim any averaging",
    ),
    Mutant(
        "scale/tasks.py",
        "environment.pop(OUTCOME_FILE, None)",
        "environment.get(OUTCOME_FILE)",
        (f"{TASKS}::test_success_records_nothing_and_grandchildren_do_not_inherit_the_file",),
        "a process that a task starts overwrites the reason of the task",
    ),
    Mutant(
        "scale/child.py",
        "while os.getppid() == int(parent):",
        "while True:",
        (f"{TASKS}::test_a_child_of_a_dead_worker_ends",),
        "the child of a killed worker trains on while the retry starts elsewhere",
    ),
    Mutant(
        "scale/session.py",
        "if _lock(descriptor, path):\n            return",
        "if False:\n            return",
        (f"{SESSION}::test_a_node_with_a_copy_of_the_folder_is_refused",),
        "a node that shares no locks joins, and two nodes train into one run",
    ),
    Mutant(
        "scale/session.py",
        "if driver.get(name) != here.get(name):",
        "if False:",
        (f"{SESSION}::test_other_code_is_refused",),
        "a node with another version computes rows",
    ),
    Mutant(
        "scale/ray_bridge.py",
        "elif task.losses > RETRIES:",
        "elif False:",
        (f"{EXECUTORS}::test_retries_are_bounded_and_the_other_tasks_go_on",),
        "a task that kills its node is retried forever",
    ),
    Mutant(
        "paper/runner.py",
        "outcome.error == BusyError.__name__ or",
        '"is in use" in reason or',
        (f"{RUNNER}::test_a_child_that_came_second_tries_again",),
        "whether to wait is read from the words of a message",
    ),
    Mutant(
        "operator_norm.py",
        "math.ceil((n + p) / s) + k - 1 for n, p, s, k",
        "math.ceil(n / s) for n, p, s, k",
        (
            f"{NORM}::test_a_grid_without_room_for_the_kernel_is_not_a_bound",
            f"{NORM}::test_the_bound_is_never_below_power_iteration",
        ),
        "the grid of the Fourier transform has no room for the padding, so the norm can be too small",
    ),
    Mutant(
        "operator_norm.py",
        "return torch.where(finite, _scaled(gradient, scale), math.nan).to(weight.dtype)",
        "return torch.where(finite, gradient, math.nan).to(weight.dtype)",
        (f"{NORM}::test_the_gradient_of_the_norm_is_that_of_autograd_and_gives_its_value",),
        "the norm that a kernel is divided by forgets the noise scales of the channels",
    ),
    Mutant(
        "models/noisy.py",
        "norm = (copies * norm_gradient(weight, scales, geometry)).flatten(1).sum(1)",
        "norm = (copies.detach() * norm_gradient(weight, scales, geometry)).flatten(1).sum(1)",
        (f"{NOISY}::test_the_gradient_of_the_norm_against_finite_differences",),
        "the gradient does not go through the norm of the noisy layer",
    ),
    Mutant(
        "certification/laws.py",
        "return math.hypot(self.input_scale, 1.0 / self.whitened_norm) * _DOWN",
        "return (self.input_scale + 1.0 / self.whitened_norm) * _DOWN",
        (f"{LAWS}::test_two_sites_add_in_quadrature",),
        "the radii of two noise sites are added",
    ),
    Mutant(
        "certification/laws.py",
        "    if smoothing not in (None, own):",
        "    if False:",
        (f"{LAWS}::test_the_law_is_never_taken_from_the_caller",),
        "a caller may state a smaller norm than the model has",
    ),
    Mutant(
        "certification/laws.py",
        "plain.hidden(x.to(scales.device)) / scales)",
        "plain.hidden(x.to(scales.device)))",
        (f"{LAWS}::test_the_same_votes_for_a_whole_model_as_for_the_model_itself",),
        "the hidden values of an image are not whitened",
    ),
    Mutant(
        "certification/bounds.py",
        "runner_up = max(others) + n - sum(votes)",
        "runner_up = max(others)",
        (f"{PIXELDP}::test_votes_for_no_class_may_belong_to_the_runner_up",),
        "PixelDP's bound takes ties for votes of no class at all",
    ),
    Mutant(
        "release/laws.py",
        "if not math.isclose(found.whitened_norm or 0.0, stated.whitened_norm or 0.0, rel_tol=_CLOSE):",
        "if False:",
        (f"{INNER_NOISE}::test_a_tampered_law_fails",),
        "verify believes the norm in the file",
    ),
    # the systems that the paper quotes
    Mutant(
        "models/autoencoder.py",
        "keepdim=True) * (-2.0 / self.model.image_size)",
        "keepdim=True) * (-1.0 / self.model.image_size)",
        (f"{PRIOR_SYSTEMS}::test_the_column_of_the_reconstruction_has_the_gradient_of_the_error",),
        "the reconstruction has half its gradient",
    ),
    Mutant(
        "views/stobatch.py",
        "moved = torch.minimum(torch.maximum(moved, x - self.radius), x + self.radius)",
        "moved = torch.maximum(moved, x - self.radius)",
        (f"{PRIOR_SYSTEMS}::test_stobatch_attacks_stay_in_their_ball_and_raise_the_loss",),
        "an attack leaves its ball",
    ),
    Mutant(
        "views/inner.py",
        "images = x + model.input_scale * at_input",
        "images = x + at_input",
        (f"{PRIOR_SYSTEMS}::test_a_view_has_the_noise_of_the_law_at_every_site",),
        "training has other noise on the pixels than the certificate",
    ),
    Mutant(
        "models/systems.py",
        "each = sigma / math.sqrt(2.0)",
        "each = sigma / 2.0",
        ("tests/models/test_systems.py::test_the_noise_is_worth_sigma_at_the_input",),
        "the noise at two sites is added up instead of taken in quadrature",
    ),
    Mutant(
        "privacy/statement.py",
        'facts["clip_rule"] not in UNBOUNDED,',
        'facts["clip_rule"] != "none",',
        (f"{PRIOR_SYSTEMS}::test_as_published_trains_and_says_that_it_is_not_private",),
        "a clipped batch mean passes for clipped gradients",
    ),
    Mutant(
        "serve/model.py",
        "ticket, tell, secret_key()",
        "ticket, tell, bytes(32)",
        (f"{SERVE}::test_equal_requests_have_different_noise",),
        "a client can learn the noise of the service and adapt an image to it",
    ),
    Mutant(
        "serve/turns.py",
        "self._waiting.popleft()",
        "self._waiting.pop()",
        (f"{SERVE_TURNS}::test_requests_take_turns_in_the_order_of_asking",),
        "the request that waits longest is served last",
    ),
    Mutant(
        "serve/turns.py",
        "if self.in_progress >= self.limit:",
        "if self.in_progress > self.limit:",
        (f"{SERVE_TURNS}::test_a_desk_admits_no_more_than_its_limit_and_counts_threads_not_clients",),
        "the queue has no limit that holds",
    ),
    Mutant(
        "serve/guard.py",
        'self._digest) and scheme.lower() == "bearer"',
        'self._digest) or scheme.lower() == "bearer"',
        (f"{SERVE_LIMITS}::test_the_key_is_asked_for_everywhere_but_the_page_and_health",),
        "any key opens the service",
    ),
    Mutant(
        "serve/gallery.py",
        "if wanted is None and (run.config.data.path or run.has_given_data):",
        "if wanted is None and run.has_given_data:",
        (f"{SERVE_COMMAND}::test_test_images_of_custom_data_are_shown_only_if_asked_for",),
        "test images of private data are shown to everyone",
    ),
    Mutant(
        "runs/open.py",
        "sha256_hex(stored), shape",
        "sha256_hex(read_file(directory.model)), shape",
        (f"{SERVE_LIMITS}::test_the_digest_is_of_the_bytes_that_were_loaded",),
        "answers name another model than the one that gave them",
    ),
    Mutant(
        "runs/predict.py",
        "if picture.mode not in _MODES or _is_transparent(picture):",
        "if _is_transparent(picture):",
        ("tests/serve/test_bodies.py::test_pictures_that_eight_bits_would_change_are_refused",),
        "a 16-bit picture is clipped to white and certified",
    ),
]

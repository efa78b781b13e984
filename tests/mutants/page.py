"""Hand-made faults of the page and of the static demo. Those of JavaScript need Node: without it their tests are skipped."""

from tests.mutants.mutant import Mutant
from tests.serve.page.node import NODE

DEMO, MATH, DIGIT = "tests/serve/test_demo.py", "tests/serve/page/test_math.py", "tests/serve/page/test_digit.py"
FILES = "tests/serve/page/test_files.py"

SCRIPTS = [
    Mutant(
        "serve/page/bounds.js",
        "const logAlpha = Math.log(alpha);",
        "const logAlpha = Math.log(alpha / 2);",
        (f"{MATH}::test_bound_and_radius_equal_pythons",),
        "the browser's bound is for another alpha",
    ),
    Mutant(
        "serve/page/noise.js",
        "((high >>> 5) * 67108864 + (low >>> 6)) * TO_UNIT",
        "high * 2 ** -32",
        (f"{MATH}::test_the_tail_of_the_noise_is_not_cut_and_no_bits_are_reused",),
        "the noise of the browser has 32 bits and no tail",
    ),
    Mutant(
        "serve/page/smooth.js",
        "if (Number.isNaN(value)) return -1;",
        "if (Number.isNaN(value)) continue;",
        (f"{MATH}::test_votes_are_counted_as_python_counts_them",),
        "the browser counts a vote whose logits contain a NaN",
    ),
    Mutant(
        "serve/page/smooth.js",
        "lowerConfidenceBound(votes[selected], n, alpha)",
        "lowerConfidenceBound(votes[selected] + selection[selected], n + n0, 2 * alpha)",
        (f"{MATH}::test_certificates_keep_alpha",),
        "the browser certifies at twice the alpha",
    ),
    Mutant(
        "serve/page/digit.js",
        "const column = Math.ceil(",
        "const column = Math.floor(",
        (f"{DIGIT}::test_a_digit_drawn_elsewhere_and_larger_is_the_digit_again",),
        "a drawing is one pixel off the center of the training images",
    ),
]

PAGE = [
    Mutant(
        "serve/export.py",
        "_images(gallery_of(run, gallery))",
        "_images(gallery_of(run, True))",
        (f"{DEMO}::test_test_images_of_custom_data_are_left_out_unless_asked_for",),
        "a demo publishes test images of private data",
    ),
    Mutant(
        "serve/runtime.py",
        "if actual != SHA512:",
        "if False:",
        (f"{DEMO}::test_another_archive_than_the_tested_one_is_refused",),
        "a demo runs code that nobody tested",
    ),
    Mutant(
        "serve/export.py",
        "script-src 'self' 'wasm-unsafe-eval'; style-src",
        "script-src 'self' 'unsafe-inline' 'wasm-unsafe-eval'; style-src",
        (f"{FILES}::test_a_demo_says_where_it_computes_and_has_its_own_policy",),
        "a demo allows scripts in its HTML",
    ),
    *(SCRIPTS if NODE else []),
]

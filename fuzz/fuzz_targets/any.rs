//! libFuzzer with the target that the environment variable `TARGET` names.

#![no_main]

use std::sync::LazyLock;

use gemma4_fuzz::{TARGETS, Target, prepare};
use libfuzzer_sys::fuzz_target;

static CHOSEN: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("TARGET").unwrap_or_default();
    let found = TARGETS.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("TARGET names one of {:?}", TARGETS.map(|(name, _)| name))).1
});

fuzz_target!(init: prepare(), |input: &[u8]| CHOSEN(input));

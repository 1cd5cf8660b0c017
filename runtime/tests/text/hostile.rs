//! Templates that were made to do harm end in an error.

use std::time::{Duration, Instant};

use gemma4_runtime::text::TextError;

use crate::data;

fn fate(source: &str) -> Result<usize, TextError> {
    let messages = [data::user("Hi")];
    let start = Instant::now();
    let fate = data::compile(source)
        .and_then(|template| template.render(&data::chat(&messages), &data::tokenizer()))
        .map(|rendered| rendered.text().len());
    let time = start.elapsed();
    println!("{time:?} {fate:?} {}", &source[..source.len().min(60)]);
    assert!(time < Duration::from_secs(60), "{time:?}");
    fate
}

#[test]
fn templates_that_do_not_end_are_stopped() {
    let loops = "{% for i in range(99999) %}".repeat(4) + &"{% endfor %}".repeat(4);
    let printing =
        "{% for i in range(99999) %}".repeat(2) + &"x".repeat(4096) + &"{% endfor %}".repeat(2);
    for source in [&loops, &printing] {
        let error = fate(source).unwrap_err();
        assert!(matches!(error, TextError::Runaway { .. }), "{error}");
    }
}

#[test]
fn recursion_without_end_is_an_error() {
    for source in [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "{% include 'chat_template' %}",
        "{% extends 'chat_template' %}",
    ] {
        fate(source).unwrap_err();
    }
    for deep in ["(", "[", "{'a':", "not ", "-", "a.b(", "{% if a %}", "{% for a in b %}"] {
        fate(&format!("{{{{ {}", deep.repeat(65_000 / deep.len()))).unwrap_err();
        fate(&deep.repeat(65_000 / deep.len())).ok();
    }
}

#[test]
fn absurd_numbers_are_errors() {
    for source in [
        "{{ range(99999999999) | list }}",
        "{{ 'a' * 9999999999999 }}",
        "{{ [1] * 9999999999999 }}{{ [1] * 9999999999999 | tojson }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 1 // 0 }}",
        "{{ 1 % 0 }}",
        "{{ -9223372036854775808 // -1 }}",
        "{{ 'a' | indent(9999999999999999) }}",
        "{{ [1] | tojson(indent=9999999999999) }}",
        "{{ [1] | batch(99999999999999, 1) | list }}",
        "{{ [1] | slice(99999999999999) | list }}",
        "{{ '%99999999999999d' | format(1) }}",
        "{{ '{:>99999999999999}'.format('a') }}",
        "{{ 1 | round(999999999999) }}",
        "{{ 'abc'[-9223372036854775808:9223372036854775807:9223372036854775807] }}",
        "{{ 'abc'.count('') }}{{ 'abc'.replace('', 'x') }}{{ 'abc'.split('') }}",
        "{{ lipsum(n=99999999) }}{{ cycler() }}",
        "{{ strftime_now('%' * 1000) }}{{ strftime_now('%') }}",
    ] {
        fate(source).ok();
    }
}

/// Dropping, comparing or printing such a value takes a stack frame for each level.
#[test]
fn deeply_nested_values_are_no_danger() {
    let literal = "[".repeat(40) + "ns.x" + &"]".repeat(40);
    let loops =
        [("[ns.x]", 99_999), ("{'a': ns.x}", 20_000), ("ns.x | list", 20_000), (&literal, 3500)];
    for (inner, times) in loops {
        for end in
            ["", "{{ ns.x ~ '' }}", "{{ ns.x == [ns.x] }}", "{{ ns.x < [ns.x] }}", "{{ ns.x }}"]
        {
            fate(&format!(
                "{{% set ns = namespace(x=[]) %}}{{% for i in range({times}) %}}\
                 {{% set ns.x = {inner} %}}{{% endfor %}}{end}"
            ))
            .ok();
        }
    }
}

/// The compiler recurses over expressions, however they came to be deep.
#[test]
fn deep_expressions_are_no_danger() {
    for (start, link) in [
        ("{{ a", "+a"),
        ("{{ a", ".b"),
        ("{{ a", "|d"),
        ("{{ a", "[0]"),
        ("{{ a", "()"),
        ("{{ a", "~a"),
        ("{{ a", " and a"),
        ("{{ a", " if a else a"),
        ("{{ a", "<a"),
        ("{{ a", " is b"),
        ("{% if a %}", "{% elif a %}"),
        ("", "{% set a=[a] %}"),
    ] {
        let end = if start.starts_with("{{") {
            " }}"
        } else if start.is_empty() {
            ""
        } else {
            "{% endif %}"
        };
        fate(&(start.to_owned() + &link.repeat(32_000 / link.len()) + end)).ok();
    }
}

/// What one operation builds is bounded, however few steps it takes: by adding, printing into a
/// variable, repeating, replacing, joining and listing.
#[test]
fn values_that_grow_without_end_are_stopped() {
    let doubling = |step: &str| {
        format!(
            "{{% set ns = namespace(s='0123456789abcdef') %}}{{% for i in range(60) %}}\
             {step}{{% endfor %}}{{{{ ns.s | length }}}}"
        )
    };
    let long = "x".repeat(60_000);
    for source in [
        doubling("{% set ns.s = ns.s + ns.s %}"),
        doubling("{% set ns.s = ns.s ~ ns.s %}"),
        doubling("{% set ns.s = ns.s * 2 %}"),
        doubling("{% set ns.s = ns.s | replace('a', 'aaaa') %}"),
        doubling("{% set ns.s = [ns.s, ns.s] | join('-') %}"),
        doubling("{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = s %}"),
        doubling("{% set ns.s = [ns.s, ns.s] %}") + "{{ ns.s }}",
        doubling("{% set ns.s = [ns.s, ns.s] %}") + "{{ ns.s | tojson }}",
        format!("{{% set s %}}{{% for i in range(50000) %}}{long}{{% endfor %}}{{% endset %}}"),
        "{% for x in ([0] * 10**15) | list %}{% endfor %}".to_owned(),
        "{% set x = ([0] * 10**12) | map('string') | join %}".to_owned(),
    ] {
        let error = fate(&source).unwrap_err();
        let stopped = matches!(error, TextError::Runaway { .. } | TextError::Template { .. });
        assert!(stopped, "{error}");
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    // Those eleven hold at most 64 MiB each; the rest is what other tests of this process take.
    assert!(peak < 3 << 20, "{peak} kB");
}

/// Comparing what is nested twice at each level takes time that no steps count.
#[test]
fn comparisons_that_do_not_end_are_stopped() {
    let source = "{% set ns = namespace(a=[0], b=[0]) %}{% for i in range(60) %}\
        {% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}\
        {{ ns.a == ns.b }}";
    let error = fate(source).unwrap_err();
    assert!(error.to_string().contains("seconds"), "{error}");
}

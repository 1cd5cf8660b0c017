//! Plans that lack a fusion, beside the one that has all.

use std::collections::HashSet;

use gemma4_format::plan::{Argument, Launch, Place};
use gemma4_kernels::{Arch, ArgKind};

use super::super::schedule::Schedule;
use super::super::stages::Stages;
use super::super::{Fusions, Target};
use super::{plan, program};

fn schedule(program: &gemma4_format::Program, target: Target, fusions: Fusions) -> Schedule {
    let stages = Stages::find(program).unwrap();
    Schedule::new(program, &stages, target.arch(), target.multiprocessors(), fusions).unwrap()
}

/// Of each launch the kernel's symbol and the value of a macro.
fn launches<'a>(
    schedule: &'a Schedule,
    list: &'a [Launch],
    of: &'a str,
) -> impl Iterator<Item = (&'static str, Option<&'a str>)> {
    list.iter().map(move |launch| {
        let kernel = &schedule.kernels[launch.kernel as usize];
        let value = kernel.defines.iter().find(|(name, _)| *name == of);
        (kernel.symbol, value.map(|(_, value)| value.as_str()))
    })
}

#[test]
fn the_lists_of_launches_differ_where_a_fusion_lacks() {
    let program = program();
    for arch in [Arch::Sm80, Arch::Sm90, Arch::Sm90a] {
        let of = |name: &str| {
            let fusions = Fusions::without(name).unwrap();
            schedule(&program, Target::Machine(arch), fusions)
        };
        let fused = schedule(&program, Target::Machine(arch), Fusions::default());
        let [norms, rows, sums] = Fusions::NAMES.map(of);
        for (i, form) in fused.methods.iter().enumerate() {
            let list = |schedule: &Schedule| -> Vec<&str> {
                let list = launches(schedule, &schedule.methods[i].launches, "");
                list.map(|(symbol, _)| symbol).collect()
            };
            let adds = |(_, splits): &(&str, Option<&str>)| *splits != Some("0");
            let norm_follows = launches(&fused, &form.launches, "NEXT")
                .zip(launches(&fused, &form.launches, "SPLITS"))
                .map(|((symbol, next), add)| {
                    (symbol, symbol == "add_norm" && next == Some("1") && adds(&add))
                });
            let expected: Vec<&str> = norm_follows
                .flat_map(|(symbol, twice)| vec![symbol; 1 + usize::from(twice)])
                .collect();
            assert_eq!(list(&norms), expected, "{} {}", arch, form.method);
            assert!(expected.len() >= form.launches.len() + 2 * 60 - 1);

            assert_eq!(list(&rows), list(&fused));

            let expected: Vec<&str> = launches(&fused, &form.launches, "OUTPUT")
                .flat_map(|(symbol, output)| match (symbol, output) {
                    ("linear_many", Some("2")) => vec![symbol, "geglu"],
                    _ => vec![symbol],
                })
                .collect();
            assert_eq!(list(&sums), expected, "{} {}", arch, form.method);
            let more = if form.method == "prefill" { 60 } else { 0 };
            assert_eq!(expected.len(), form.launches.len() + more);
        }
    }
}

#[test]
fn no_kernel_has_what_its_plan_lacks() {
    let program = program();
    let has = |fusions, name, value: &str| {
        let schedule = schedule(&program, Target::Machine(Arch::Sm90a), fusions);
        let mut kernels = schedule.kernels.iter();
        kernels.any(|kernel| kernel.defines.iter().any(|(n, v)| *n == name && v == value))
    };
    for (fusion, name, value) in
        [("split", "SPLIT_INPUT", "1"), ("split", "SPLIT_OUTPUT", "1"), ("geglu", "OUTPUT", "2")]
    {
        assert!(has(Fusions::default(), name, value), "{fusion}");
        assert!(!has(Fusions::without(fusion).unwrap(), name, value), "{fusion}");
    }
}

/// Offsets of scratch memory that a launch reads and writes.
fn touched(schedule: &Schedule, launch: &Launch) -> [Vec<u64>; 2] {
    let kernel = &schedule.kernels[launch.kernel as usize];
    let offsets = |kinds: [ArgKind; 2]| {
        let pairs = kernel.args.iter().zip(&launch.arguments);
        let offset = |argument: &Argument| match argument {
            Argument::Address(Place::Scratch, offset)
            | Argument::LastRow { place: Place::Scratch, offset, .. } => Some(*offset),
            _ => None,
        };
        pairs.filter(|(arg, _)| kinds.contains(&arg.kind)).filter_map(|(_, a)| offset(a)).collect()
    };
    [offsets([ArgKind::Read, ArgKind::Update]), offsets([ArgKind::Write, ArgKind::Update])]
}

#[test]
fn plans_without_a_fusion_are_right_for_every_target() {
    let program = program();
    for fusions in Fusions::NAMES.map(|name| Fusions::without(name).unwrap()) {
        for target in Target::DEFAULT {
            let schedule = schedule(&program, target, fusions);
            for method in
                schedule.methods.iter().filter(|m| m.max_rows == 1 || m.method == "prefill")
            {
                let mut written = HashSet::new();
                for launch in &method.launches {
                    let symbol = schedule.kernels[launch.kernel as usize].symbol;
                    let [read, wrote] = touched(&schedule, launch);
                    let known = |at: &u64| written.contains(at) || symbol == "linear_many";
                    assert!(read.iter().all(known), "{target}: {symbol} in {}", method.method);
                    written.extend(wrote);
                }
            }
            let room = target.shared_per_block();
            assert!(schedule.kernels.iter().all(|kernel| kernel.shared <= room), "{target}");
            gemma4_format::plan::verify(&plan(target, schedule), &program, 1).unwrap();
        }
    }
}

#[test]
fn an_unknown_fusion_is_refused_with_those_that_are_known() {
    let error = Fusions::without("rope").unwrap_err();
    assert!(Fusions::NAMES.iter().all(|name| error.contains(name)), "{error}");
}

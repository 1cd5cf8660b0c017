//! Which plan of a program a GPU runs.

use std::fmt;

use gemma4_format::plan::Plan;

/// Compute capability of a GPU, or the one that code is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Capability {
    pub(super) major: u32,
    pub(super) minor: u32,
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What machine code is for, from [`Plan::target`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// PTX, which the driver compiles, rather than a cubin.
    pub(super) ptx: bool,
    pub(super) capability: Capability,
    /// Runs on no other capability: it uses instructions that later GPUs do not have.
    pub(super) exact: bool,
}

impl Target {
    /// Reads `sm_80`, `sm_90a` or `compute_80`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (ptx, rest) = match text.strip_prefix("compute_") {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix("sm_")?),
        };
        let (digits, exact) = match rest.strip_suffix('a') {
            Some(digits) => (digits, true),
            None => (rest, false),
        };
        if !(2..=4).contains(&digits.len()) || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        let number: u32 = digits.parse().ok()?;
        let capability = Capability { major: number / 10, minor: number % 10 };
        Some(Self { ptx, capability, exact })
    }

    /// How well it suits a GPU, or `None` if it does not run there: machine code before PTX, then
    /// what is made for this very capability, then the nearest.
    fn rank(self, gpu: Capability) -> Option<(bool, bool, Capability)> {
        let Self { ptx, capability, exact } = self;
        let runs = match (exact, ptx) {
            (true, _) => capability == gpu,
            (false, true) => capability <= gpu,
            (false, false) => capability.major == gpu.major && capability <= gpu,
        };
        runs.then_some((!ptx, exact, capability))
    }
}

/// Index of the plan that suits a GPU best, and what its code is for. Among equals the first.
pub(super) fn choose(plans: &[Plan], gpu: Capability) -> Option<(usize, Target)> {
    let suited = plans.iter().enumerate().rev().filter_map(|(index, plan)| {
        let target = Target::parse(&plan.target)?;
        Some((target.rank(gpu)?, index, target))
    });
    let (_, index, target) = suited.max_by_key(|(rank, ..)| *rank)?;
    Some((index, target))
}

/// Why no plan suits a GPU, and what to do.
pub(super) fn refusal(file: &str, plans: &[Plan], name: &str, gpu: Capability) -> String {
    if plans.is_empty() {
        return format!("`{file}` has no code for a GPU; use the CPU with `--device cpu`");
    }
    let targets: Vec<&str> = plans.iter().map(|p| p.target.as_str()).collect();
    let least = plans.iter().filter_map(|p| Target::parse(&p.target)).map(|t| t.capability).min();
    let have = format!("`{file}` has code for {}", targets.join(", "));
    match least {
        Some(least) if gpu < least => format!(
            "{name} has compute capability {gpu}, and {have}: capability {least} or later is \
             needed; use the CPU with `--device cpu`"
        ),
        _ => format!(
            "{have}, and {name} has compute capability {gpu}: export the program for sm_{}{}, or \
             use the CPU with `--device cpu`",
            gpu.major, gpu.minor
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::testing::plan_for;

    fn chosen(targets: &[&str], major: u32, minor: u32) -> Option<String> {
        let plans: Vec<Plan> = targets.iter().map(|t| plan_for(t)).collect();
        choose(&plans, Capability { major, minor }).map(|(index, _)| plans[index].target.clone())
    }

    #[test]
    fn the_most_specific_code_that_runs_is_chosen() {
        let all = ["compute_80", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_120"];
        let cases: [(u32, u32, Option<&str>); 11] = [
            (7, 5, None),
            (8, 0, Some("sm_80")),
            (8, 6, Some("sm_86")),
            (8, 7, Some("sm_86")),
            (8, 9, Some("sm_89")),
            (9, 0, Some("sm_90a")),
            (9, 1, Some("sm_90")),
            (10, 0, Some("compute_80")),
            (12, 0, Some("sm_120")),
            (12, 1, Some("sm_120")),
            (13, 0, Some("compute_80")),
        ];
        for (major, minor, expected) in cases {
            assert_eq!(chosen(&all, major, minor).as_deref(), expected, "{major}.{minor}");
        }
    }

    #[test]
    fn the_order_of_the_plans_does_not_matter() {
        assert_eq!(chosen(&["sm_90a", "sm_90"], 9, 0).as_deref(), Some("sm_90a"));
        assert_eq!(chosen(&["sm_90", "sm_90a"], 9, 0).as_deref(), Some("sm_90a"));
        assert_eq!(chosen(&["compute_70", "compute_80"], 9, 0).as_deref(), Some("compute_80"));
        assert_eq!(chosen(&["compute_80", "sm_90"], 9, 0).as_deref(), Some("sm_90"));
    }

    #[test]
    fn code_of_another_major_or_for_other_instructions_does_not_run() {
        assert_eq!(chosen(&["sm_80", "sm_120"], 9, 0), None);
        assert_eq!(chosen(&["sm_90a", "compute_90a"], 10, 0), None);
        assert_eq!(chosen(&["sm_89"], 8, 6), None);
        assert_eq!(chosen(&["compute_90"], 8, 9), None);
    }

    #[test]
    fn only_names_of_nvidia_architectures_are_read() {
        let capability = Capability { major: 10, minor: 3 };
        assert_eq!(Target::parse("sm_103a"), Some(Target { ptx: false, capability, exact: true }));
        for text in ["", "sm_", "sm_9", "sm_+90", "sm_90 ", "sm_90f", "gfx90a", "compute_a", "90"] {
            assert_eq!(Target::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_refusal_names_both_sides() {
        let plans = [plan_for("sm_80"), plan_for("sm_90a")];
        let old = refusal("m.pte", &plans, "NVIDIA V100", Capability { major: 7, minor: 0 });
        for word in ["m.pte", "NVIDIA V100", "7.0", "8.0 or later", "sm_80, sm_90a"] {
            assert!(old.contains(word), "{old}");
        }
        let new = refusal("m.pte", &plans, "NVIDIA B200", Capability { major: 10, minor: 0 });
        assert!(new.contains("sm_100"), "{new}");
        let none = refusal("m.pte", &[], "NVIDIA B200", Capability { major: 10, minor: 0 });
        assert!(none.contains("no code for a GPU"), "{none}");
    }
}

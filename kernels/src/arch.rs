//! The GPU architectures that kernels are compiled for.

use std::fmt;
use std::str::FromStr;

/// An NVIDIA GPU architecture, as the compiler names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arch {
    /// A100.
    Sm80,
    /// GeForce 30, A10, A40.
    Sm86,
    /// GeForce 40, L4, L40.
    Sm89,
    /// H100, H200: the portable kernels.
    Sm90,
    /// H100, H200: the kernels that use instructions of exactly this architecture.
    Sm90a,
    /// B200.
    Sm100,
    /// GeForce 50.
    Sm120,
}

impl Arch {
    /// Every architecture, oldest first.
    pub const ALL: [Arch; 7] =
        [Arch::Sm80, Arch::Sm86, Arch::Sm89, Arch::Sm90, Arch::Sm90a, Arch::Sm100, Arch::Sm120];

    /// `sm_80` ...
    pub fn name(self) -> &'static str {
        match self {
            Arch::Sm80 => "sm_80",
            Arch::Sm86 => "sm_86",
            Arch::Sm89 => "sm_89",
            Arch::Sm90 => "sm_90",
            Arch::Sm90a => "sm_90a",
            Arch::Sm100 => "sm_100",
            Arch::Sm120 => "sm_120",
        }
    }

    /// Compute capability of the devices that run it: major and minor.
    pub fn capability(self) -> (u32, u32) {
        match self {
            Arch::Sm80 => (8, 0),
            Arch::Sm86 => (8, 6),
            Arch::Sm89 => (8, 9),
            Arch::Sm90 | Arch::Sm90a => (9, 0),
            Arch::Sm100 => (10, 0),
            Arch::Sm120 => (12, 0),
        }
    }

    /// Shared memory that one block may use, bytes (CUDA C++ Programming Guide, table of
    /// technical specifications per compute capability).
    pub fn shared_per_block(self) -> u32 {
        match self {
            Arch::Sm80 => 163 * 1024,
            Arch::Sm86 | Arch::Sm89 | Arch::Sm120 => 99 * 1024,
            Arch::Sm90 | Arch::Sm90a | Arch::Sm100 => 227 * 1024,
        }
    }

    /// Whether kernels may start before their predecessor ends (programmatic dependent launch).
    pub fn dependent_launch(self) -> bool {
        self >= Arch::Sm90
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Arch {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Arch::ALL.into_iter().find(|arch| arch.name() == name).ok_or_else(|| {
            let known: Vec<_> = Arch::ALL.iter().map(|arch| arch.name()).collect();
            format!("unknown architecture `{name}`; known are {}", known.join(", "))
        })
    }
}

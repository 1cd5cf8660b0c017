//! The fuzz targets on the stable compiler: the stored corpus, and mutations of it.

#[allow(unreachable_pub, reason = "the targets are a library in the workspace of libFuzzer")]
#[path = "../../fuzz/src/lib.rs"]
mod targets;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use targets::TARGETS;

/// Time for mutations of one target, in seconds, unless `FUZZ_SECONDS` says another.
const SECONDS: u64 = 4;
/// Longest time for one input.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn stored_inputs_and_mutations_of_them_are_refused_or_used() {
    let corpus = unpacked();
    let seconds = std::env::var("FUZZ_SECONDS").ok().and_then(|text| text.parse().ok());
    let time = Duration::from_secs(seconds.unwrap_or(SECONDS));
    std::thread::scope(|scope| {
        let halves = TARGETS.chunks(TARGETS.len().div_ceil(2));
        let works = halves.map(|half| {
            let corpus = &corpus;
            scope.spawn(move || {
                for (name, target) in half {
                    fuzz(name, *target, &inputs(&corpus.path().join(name)), time);
                }
            })
        });
        let works: Vec<_> = works.collect();
        for work in works {
            if let Err(panic) = work.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
    targets::clean();
}

fn fuzz(name: &str, target: targets::Target, inputs: &[Vec<u8>], time: Duration) {
    assert!(!inputs.is_empty(), "the corpus of `{name}` is empty");
    let started = Instant::now();
    inputs.iter().for_each(|input| check(name, target, input));
    eprintln!("{name}: {} stored inputs in {:.1?}", inputs.len(), started.elapsed());
    let (started, mut random, mut count) = (Instant::now(), Random(7), 0);
    while started.elapsed() < time {
        check(name, target, &mutated(inputs, &mut random));
        count += 1;
    }
    eprintln!("{name}: {count} mutations");
}

/// Runs a target on an input, which a failure leaves in a file.
fn check(name: &str, target: targets::Target, input: &[u8]) {
    let started = Instant::now();
    let result = catch_unwind(AssertUnwindSafe(|| target(input)));
    let took = started.elapsed();
    if result.is_err() || took > PATIENCE {
        let path = std::env::temp_dir().join(format!("gemma4-fuzz-{name}.input"));
        fs::write(&path, input).expect("room for the input");
        panic!("`{name}` failed, or took too long ({took:.1?}), on {}", path.display());
    }
}

/// The stored corpus.
fn unpacked() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let archive = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus.tar.xz");
    let script = "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])";
    let mut python = Command::new("python3");
    python.args(["-W", "ignore", "-c", script]).arg(archive).arg(dir.path());
    assert!(python.status().expect("python3 runs").success(), "the corpus can't be unpacked");
    dir
}

fn inputs(dir: &Path) -> Vec<Vec<u8>> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(dir).expect("a corpus").map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).expect("readable")).collect()
}

/// Uniform numbers from a linear congruential generator (Knuth, MMIX).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n.max(1)
    }
}

/// One of the inputs with up to four changes.
fn mutated(inputs: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut bytes = inputs[random.below(inputs.len())].clone();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len() + 1);
        let end = (at + 1 + random.below(16)).min(bytes.len());
        match random.below(6) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 if at < bytes.len() => bytes[at] = random.below(256) as u8,
            2 => drop(bytes.drain(at..end)),
            3 => {
                let copy = bytes[at..end].to_vec();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, copy);
            }
            4 => {
                let other = &inputs[random.below(inputs.len())];
                let from = random.below(other.len() + 1);
                let piece = &other[from..(from + 32).min(other.len())];
                bytes.splice(at..end, piece.iter().copied());
            }
            _ => {
                let number = [0, 1, 127, 255, 1 << 16, u32::MAX >> 1, u32::MAX][random.below(7)];
                let end = (at + 4).min(bytes.len());
                bytes.splice(at..end, number.to_le_bytes());
            }
        }
    }
    bytes
}

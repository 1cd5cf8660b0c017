//! Calls of the NVIDIA driver that fail, one by one, at every place that makes one.
//!
//! The commands run on a driver without a GPU (`ci/faults/fake_cuda.c`) behind one that fails
//! (`ci/faults/failing_cuda.c`), both compiled by `cc`. Kernels do nothing there, so that the
//! program needs no code: its only module is an empty ELF file.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use gemma4_exporter::checkpoint::Checkpoint;
use gemma4_exporter::export::{Options, export};
use gemma4_exporter::lower::{Fusions, Target, plans_without_code};
use gemma4_exporter::output::Monitor;
use gemma4_format::pte;
use rayon::prelude::*;
use tempfile::TempDir;

/// Codes of the driver: an invalid value, no memory, a fault of a kernel, an unknown one.
const CODES: [u32; 4] = [1, 2, 700, 999];
/// Calls on which an answer need not depend: what gives back and waits for that, and what a report
/// is made of.
const HARMLESS: [&str; 11] = [
    "cuStreamSynchronize",
    "cuMemGetInfo_v2",
    "cuCtxSetCurrent",
    "cuMemFree_v2",
    "cuMemFreeHost",
    "cuStreamDestroy_v2",
    "cuEventDestroy_v2",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuModuleUnload",
    "cuDevicePrimaryCtxRelease_v2",
];

/// Both drivers, and the bundled model with plans for a GPU.
struct Scene {
    dir: TempDir,
}

/// How a call is to fail.
#[derive(Clone, Copy)]
struct Fault {
    /// Number of the call, from 1.
    at: u64,
    code: u32,
    /// Whether all later ones fail, too.
    sticky: bool,
}

/// What a command did.
struct Done {
    code: Option<i32>,
    stdout: String,
    stderr: String,
    /// Calls of the driver.
    calls: u64,
    /// The one that failed, or `-`.
    failed: String,
    /// Things of the driver that were made and not given back.
    live: i64,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ci = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ci");
        for (source, library) in [("fake", "fake.so"), ("failing", "libcuda.so")] {
            let status = Command::new("cc")
                .args(["-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-o"])
                .arg(dir.path().join(library))
                .arg(ci.join(format!("faults/{source}_cuda.c")))
                .arg("-ldl")
                .status()
                .expect("a C compiler");
            assert!(status.success(), "{source}_cuda.c");
        }
        let bundle = Checkpoint::open(ci.join("models/tiny-chat-int4")).unwrap();
        let options = Options { max_seq_len: Some(256), ..Options::default() };
        let files = export(&bundle, &options, dir.path(), &Monitor::silent()).unwrap();
        let mut pte = pte::decode(&fs::read(&files.program).unwrap()).unwrap().pte;
        let target: Target = "sm_90a".parse().unwrap();
        pte.plans = plans_without_code(&pte.program, &[target], Fusions::default()).unwrap();
        pte.modules = vec![empty_elf()];
        fs::write(&files.program, pte::encode(&pte).unwrap()).unwrap();
        fs::write(dir.path().join("prompts"), "\"one\"\n\"two\"\n").unwrap();
        Self { dir }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gemma4"));
        command
            .current_dir(self.dir.path())
            .args(arguments)
            .args(["--model_path", "model.pte", "--data_path", "model.ptd"])
            .env("LD_LIBRARY_PATH", self.dir.path())
            .env("FAILING_CUDA_OVER", self.dir.path().join("fake.so"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, arguments: &[&str], fault: Option<Fault>) -> Done {
        let report = self.dir.path().join(format!("report-{}", fault.map_or(0, |f| f.at)));
        let mut command = self.command(arguments);
        command.env("FAILING_CUDA_REPORT", &report);
        if let Some(Fault { at, code, sticky }) = fault {
            command.env("FAILING_CUDA_AT", at.to_string());
            command.env("FAILING_CUDA_CODE", code.to_string());
            command.env("FAILING_CUDA_STICKY", u8::from(sticky).to_string());
        }
        let output = within_a_minute(&mut command);
        let told = fs::read_to_string(&report).expect("the driver's report");
        fs::remove_file(&report).unwrap();
        let [calls, failed, live] = told.split_whitespace().collect::<Vec<_>>()[..] else {
            panic!("{told}")
        };
        Done {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
            calls: calls.parse().unwrap(),
            failed: failed.to_owned(),
            live: live.parse().unwrap(),
        }
    }
}

/// The smallest file that the loader takes for a whole cubin: a header and a section of nothing.
fn empty_elf() -> Vec<u8> {
    let mut elf = vec![0; 128];
    elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
    elf[40] = 64;
    elf[58] = 64;
    elf[60] = 1;
    elf
}

fn within_a_minute(command: &mut Command) -> Output {
    let mut child = command.spawn().expect("runs");
    let started = Instant::now();
    // What these commands print fits the pipes.
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("it hangs: {:?}", child.wait_with_output().unwrap());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    child.wait_with_output().unwrap()
}

/// Lets calls of a command fail: the first and the last hundred, and of those between one in
/// `stride`. With `words`, its output is the beginning of what it says without a fault.
fn every_call_may_fail(arguments: &[&str], stride: usize, words: bool) -> Done {
    let scene = Scene::new();
    let whole = scene.run(arguments, None);
    assert_eq!(whole.code, Some(0), "{}", whole.stderr);
    assert_eq!((whole.failed.as_str(), whole.live), ("-", 0));
    let between = (101..=whole.calls.saturating_sub(100)).step_by(stride);
    let last = whole.calls.saturating_sub(99).max(101)..=whole.calls;
    let calls: Vec<u64> = (1..=100).chain(between).chain(last).collect();
    calls.into_par_iter().for_each(|at| {
        let code = CODES[at as usize % CODES.len()];
        // Alone, or as the first of all that follow.
        let sticky = at % 8 >= 4;
        let done = scene.run(arguments, Some(Fault { at, code, sticky }));
        let about = format!(
            "call {at} of {}, {}, code {code}, sticky {sticky}: {:?} {}{}",
            whole.calls, done.failed, done.code, done.stdout, done.stderr
        );
        assert_ne!(done.failed, "-", "{about}");
        assert_eq!(done.live, 0, "{about}");
        assert!(!done.stderr.contains("panicked"), "{about}");
        assert!(!words || whole.stdout.starts_with(done.stdout.trim_end()), "{about}");
        if done.code == Some(0) {
            assert!(HARMLESS.contains(&done.failed.as_str()), "{about}");
            assert!(!words || whole.stdout == done.stdout, "{about}");
            return;
        }
        assert_eq!(done.code, Some(3), "{about}");
        // A second prompt meets the same fault. What fails while things are given back is not
        // said, but what fails after it.
        let errors: Vec<_> =
            done.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert!(!errors.is_empty() && errors.iter().all(|e| *e == errors[0]), "{about}");
        let call = if sticky { "cu" } else { &done.failed };
        assert!(errors[0].contains(call) && errors[0].contains(&format!("({code})")), "{about}");
    });
    whole
}

#[test]
fn an_answer_survives_every_call_that_fails() {
    let done =
        every_call_may_fail(&["run", "--device", "cuda", "--prompt", "Why?", "-q"], 23, true);
    assert!(done.stdout.len() > 20, "{}", done.stdout);
}

#[test]
fn logits_survive_every_call_that_fails() {
    let json = ["--prompts", "prompts", "--output", "jsonl", "--logprobs", "2", "--no_graphs"];
    let run = ["run", "--device", "cuda", "--max_new_tokens", "3", "--seed", "1", "-q"];
    every_call_may_fail(&[&run[..], &json].concat(), 23, false);
}

#[test]
fn measurements_survive_every_call_that_fails() {
    let bench = ["bench", "--device", "cuda", "-p", "9", "-n", "4", "-r", "1"];
    every_call_may_fail(&bench, 401, false);
    every_call_may_fail(&[&bench[..], &["--profile"]].concat(), 401, false);
}

#[test]
fn a_gpu_without_memory_is_told_in_numbers() {
    let scene = Scene::new();
    let run = ["run", "--device", "cuda", "--prompt", "Why?", "-q"];
    let answer = scene.run(&run, None).stdout;
    let (mut refused, mut shorter) = (0, 0);
    for mebibytes in [1, 100, 150, 157, 160, 300] {
        let mut command = scene.command(&run);
        let output =
            within_a_minute(command.env("FAKE_CUDA_MEMORY", (mebibytes << 20).to_string()));
        let stderr = String::from_utf8(output.stderr).unwrap();
        if output.status.success() {
            assert_eq!(String::from_utf8(output.stdout).unwrap(), answer);
            continue;
        }
        assert_eq!(output.status.code(), Some(3), "{mebibytes} MiB: {stderr}");
        assert!(stderr.contains(&(mebibytes << 20).to_string()), "{mebibytes} MiB: {stderr}");
        refused += 1;
        shorter += i32::from(stderr.contains("choose a shorter context"));
    }
    assert!(refused > shorter && shorter > 0 && refused < 6, "{shorter} of {refused}");
}

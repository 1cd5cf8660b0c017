//! The CUDA device's refusals, which need no GPU: the model has code for none.

mod common;

use std::sync::Arc;

use common::{Config, Model};
use gemma4_runtime::cpu::Cpu;
use gemma4_runtime::cuda::{Cuda, Options, Weights, available};
use gemma4_runtime::{Error, LoadedProgram};

fn open(program: &Arc<LoadedProgram>, which: Option<&str>, options: Options) -> Error {
    match Cuda::open(Arc::clone(program), which, options, &|_, _| {}) {
        Ok(_) => panic!("a program without code for a GPU was loaded onto one"),
        Err(error) => error,
    }
}

#[test]
fn a_program_or_machine_without_gpu_is_refused_in_one_sentence() {
    let program = Model::new(&Config::default()).load();
    for which in [None, Some("0"), Some("99"), Some("GPU-0123"), Some("nonsense")] {
        for error in [
            open(&program, which, Options::default()),
            available(program.file(), which).expect_err("no code for a GPU"),
        ] {
            assert!(matches!(error, Error::Device(_)), "{error:?}");
            assert_eq!(error.class().code(), 3);
            assert!(!error.to_string().contains('\n'), "{error}");
        }
    }
    let error = open(&program, None, Options::default()).to_string();
    assert!(error.contains("--device cpu"), "{error}");
}

#[test]
fn a_context_outside_the_exported_range_is_refused() {
    let program = Model::new(&Config::default()).load();
    for asked in [0, Config::default().max_context + 1] {
        let options = Options { max_context: Some(asked), ..Options::default() };
        let error = open(&program, None, options);
        assert!(matches!(error, Error::Context { maximum: 200, .. }), "{error:?}");
    }
}

#[test]
fn a_program_without_its_data_file_can_only_be_measured() {
    let files = Model::new(&Config::default()).write();
    let program = Arc::new(LoadedProgram::without_weights(&files.pte).expect("opens"));
    assert!(!program.has_weights());
    let error = Cpu::new(Arc::clone(&program)).expect_err("the CPU reads weights");
    assert_eq!(error.class().code(), 3);
    assert!(error.to_string().contains("data file"), "{error}");
    let error = open(&program, None, Options::default());
    assert!(error.to_string().contains("data file"), "{error}");
    // Past that check: what is missing now is the GPU, or code for it.
    let random = Options { weights: Weights::Random(1), ..Options::default() };
    assert!(open(&program, None, random).to_string().contains("--device cpu"));
}

#[test]
fn a_mapped_program_knows_whether_it_was_verified() {
    let files = Model::new(&Config::default()).write();
    let program = LoadedProgram::map(&files.pte, &files.ptd).expect("opens");
    assert!(!program.is_verified());
    program.verify_data(&|_, _| {}).expect("as written");
    assert!(program.is_verified());
    let mut bytes = std::fs::read(&files.ptd).expect("read");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&files.ptd, bytes).expect("written");
    let program = LoadedProgram::map(&files.pte, &files.ptd).expect("opens");
    assert!(program.verify_data(&|_, _| {}).is_err());
    assert!(!program.is_verified());
}

//! What is said of files that are missing, mixed up or damaged.

mod common;

use std::fs;
use std::path::Path;
use std::sync::Mutex;

use common::{Config, Files, Model, Random};
use gemma4_runtime::{Error, LoadedProgram, ProgramFile};

fn files() -> Files {
    Model::new(&Config::default()).write()
}

fn open(pte: &Path, ptd: &Path) -> Result<LoadedProgram, Error> {
    LoadedProgram::open(pte, ptd, &|_, _| {})
}

fn refused(pte: &Path, ptd: &Path) -> String {
    open(pte, ptd).expect_err("must be refused").to_string()
}

#[test]
fn progress_ends_at_the_total() {
    let files = files();
    let seen = Mutex::new((0, 0));
    let progress = |done: u64, total: u64| {
        let mut seen = seen.lock().expect("not poisoned");
        *seen = (seen.0.max(done), total);
    };
    LoadedProgram::open(&files.pte, &files.ptd, &progress).expect("opens");
    let (done, total) = *seen.lock().expect("not poisoned");
    assert!(done == total && total > 10_000, "{done} of {total}");
}

#[test]
fn a_path_that_is_no_readable_file_is_named() {
    let files = files();
    let missing = files.directory.path().join("absent.pte");
    for text in [refused(&missing, &files.ptd), refused(&files.pte, &missing)] {
        assert!(text.contains("absent.pte") && text.contains("No such file"), "{text}");
    }
    let directory = files.directory.path();
    for text in [refused(directory, &files.ptd), refused(&files.pte, directory)] {
        assert!(text.contains("is a directory"), "{text}");
    }
    if cfg!(unix) {
        let text = refused(Path::new("/dev/null"), &files.ptd);
        assert!(text.contains("a device or pipe"), "{text}");
    }
}

#[test]
fn files_given_for_each_other_are_recognised() {
    let files = files();
    let text = refused(&files.ptd, &files.ptd);
    assert!(text.contains("model.ptd") && text.contains("the `.ptd`"), "{text}");
    let text = refused(&files.pte, &files.pte);
    assert!(text.contains("model.pte") && text.contains("this is a program"), "{text}");
}

#[test]
fn weights_of_another_export_are_refused() {
    let (a, b) = (
        files(),
        Model::new(&Config {
            hidden: 32,
            inner: 32,
            embedding: common::int8(32),
            ..Config::default()
        })
        .write(),
    );
    let text = refused(&a.pte, &b.ptd);
    assert!(text.contains("other weights"), "{text}");
    // The same header over other numbers.
    let c = Model::new(&Config { seed: 2, ..Config::default() }).write();
    let text = refused(&a.pte, &c.ptd);
    assert!(text.contains("digest of weight `") && text.contains("model.ptd"), "{text}");
}

#[test]
fn every_truncation_is_refused() {
    let files = files();
    for path in [&files.pte, &files.ptd] {
        let whole = fs::read(path).expect("readable");
        let mut lengths: Vec<usize> = (0..100).chain([whole.len() / 2, whole.len() - 1]).collect();
        let mut random = Random(1);
        lengths.extend((0..100).map(|_| random.below(whole.len() as u32) as usize));
        for length in lengths {
            fs::write(path, &whole[..length]).expect("written");
            refused(&files.pte, &files.ptd);
        }
        fs::write(path, [&whole[..], b"x"].concat()).expect("written");
        let text = refused(&files.pte, &files.ptd);
        assert!(text.contains("1 bytes follow"), "{text}");
        fs::write(path, whole).expect("written");
    }
    open(&files.pte, &files.ptd).expect("whole again");
}

#[test]
fn a_flipped_bit_anywhere_is_refused() {
    let files = files();
    for path in [&files.pte, &files.ptd] {
        let mut bytes = fs::read(path).expect("readable");
        // Every byte of the headers' beginnings, and some hundred of the rest.
        let step = (bytes.len() / 300).max(1);
        let mut random = Random(2);
        let places = (0..bytes.len()).filter(|at| *at < 250 || at % step == 0);
        for at in places.collect::<Vec<_>>() {
            let bit = 1 << random.below(8);
            bytes[at] ^= bit;
            fs::write(path, &bytes).expect("written");
            assert!(open(&files.pte, &files.ptd).is_err(), "{} byte {at}", path.display());
            bytes[at] ^= bit;
        }
        fs::write(path, &bytes).expect("written");
    }
}

#[test]
fn a_program_can_be_read_without_its_weights() {
    let files = files();
    fs::remove_file(&files.ptd).expect("removed");
    let file = ProgramFile::open(&files.pte).expect("opens");
    assert_eq!(file.program().vocab_size, 97);
    assert_eq!((file.tokenizer(), file.chat_template()), (&b"{}"[..], "{{ messages }}"));
}

//! A saved session of a small program: the input is the file, whose id and checksum are made
//! right. What is restored is saved again and goes on.

use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;

use gemma4_runtime::cpu::Cpu;
use gemma4_runtime::{Sampling, Session, SessionOptions};

use super::program::small_config;
use super::small::Model;

static CPU: LazyLock<Cpu> = LazyLock::new(|| {
    let program = Model::new(&small_config()).load();
    Cpu::with_threads(program, 1).expect("a device")
});
/// Bytes before the numbers of the file: what it is, its version, the program's id.
const HEAD: usize = 44;
const CHECKSUM: usize = 32;

/// Runs the target on an input.
pub fn run(input: &[u8]) {
    let mut session = Session::new(&*CPU, SessionOptions::default()).expect("a session");
    let _ = session.restore(&mut &*input);
    let Some(file) = repaired(&mut session, input) else { return };
    if session.restore(&mut &*file).is_err() {
        assert_eq!(session.position(), 0, "something is left of a session that was refused");
        return;
    }
    let mut saved = Vec::new();
    session.save(&mut saved).expect("room in memory");
    assert!(saved == file, "a restored session is saved differently");
    if session.decode(1).is_ok() {
        let stop = AtomicBool::new(false);
        let answer = session.generate(Sampling::GREEDY, 3, &stop).expect("logits are there");
        answer.for_each(|token| {
            token.expect("a step");
        });
    }
}

/// The input with the head of a file of this program and its own checksum.
fn repaired(session: &mut Session, input: &[u8]) -> Option<Vec<u8>> {
    let numbers = input.get(HEAD..input.len().checked_sub(CHECKSUM)?)?;
    let mut file = Vec::new();
    session.reset();
    session.save(&mut file).expect("room in memory");
    file.truncate(HEAD);
    file.extend(numbers);
    let checksum = blake3::hash(&file);
    file.extend(checksum.as_bytes());
    Some(file)
}

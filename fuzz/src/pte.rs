//! A program: every digest is made right, so that what lies behind them is reached. What is
//! accepted is described as `gemma4-inspect` does.

use gemma4_format::{Program, pte, stats};
use gemma4_runtime::roofline::Work;

/// Bytes of the header and of an entry of the table; see `format/src/pte.rs`.
const HEADER: usize = 64;
const ENTRY: usize = 56;

/// Runs the target on an input.
pub fn run(input: &[u8]) {
    let _ = pte::decode(input);
    let mut file = input.to_vec();
    if repair(&mut file).is_some()
        && let Ok(pte::Loaded { pte, .. }) = pte::decode(&file)
    {
        describe(&pte.program);
        pte.plans.iter().for_each(|plan| {
            stats::packed_bytes_per_token(plan);
        });
    }
}

/// All that is said about a program without running it.
pub(crate) fn describe(program: &Program) {
    let _ = program.to_string();
    for class in stats::weight_classes(program) {
        class.bits_per_weight();
    }
    stats::weight_bytes_per_token(program);
    stats::buffer_elements_per_token(program);
    let context = program.max_context;
    stats::buffer_elements(program, context);
    let bytes = stats::position_bytes(program, 2);
    Work::decode(program, context - 1, &bytes);
    if let Some(method) = program.method("prefill") {
        Work::prefill(program, method.max_rows, 0, &bytes);
    }
}

/// Sets magic, length, digests and id; `None` if the table does not fit the file.
fn repair(file: &mut [u8]) -> Option<()> {
    let length = file.len() as u64;
    file.get_mut(..8)?.copy_from_slice(&pte::MAGIC);
    file.get_mut(24..32)?.copy_from_slice(&length.to_le_bytes());
    let sections = u32::from_le_bytes(*file.get(12..)?.first_chunk()?) as usize;
    let table = HEADER..HEADER.checked_add(sections.checked_mul(ENTRY)?)?;
    file.get(table.clone())?;
    for entry in table.clone().step_by(ENTRY) {
        let word = |at: usize| Some(u64::from_le_bytes(*file.get(entry + at..)?.first_chunk()?));
        let (start, size) = (word(8)? as usize, word(16)? as usize);
        let digest = blake3::hash(file.get(start..start.checked_add(size)?)?);
        file[entry + 24..entry + ENTRY].copy_from_slice(digest.as_bytes());
    }
    let mut id = blake3::Hasher::new();
    id.update(&file[..32]).update(&file[table]);
    file[32..HEADER].copy_from_slice(id.finalize().as_bytes());
    Some(())
}

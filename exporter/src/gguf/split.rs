//! Models that are split into several files, `NAME-00001-of-00003.gguf`.

use std::path::{Path, PathBuf};

use super::Refusal;
use super::header::Header;
use crate::Result;

const COUNT: &str = "split.count";
const INDEX: &str = "split.no";
const TENSORS: &str = "split.tensors.count";

/// Opens a file, or all parts of the split model that it is one of, in order.
pub(super) fn open(path: &Path) -> Result<Vec<Header>> {
    let given = Header::open(path)?;
    let refused = |refusal: Refusal| refusal.at(path);
    let count = given.metadata.optional_u32(COUNT).map_err(refused)?.unwrap_or(0);
    if count <= 1 {
        return Ok(vec![given]);
    }
    let paths = siblings(path, count).map_err(refused)?;
    if let Some(missing) = paths.iter().find(|path| !path.exists()) {
        let file = missing.file_name().unwrap_or_default().to_string_lossy().into_owned();
        return Err(refused(Refusal::MissingSplit { file }));
    }
    drop(given);
    let mut parts = Vec::new();
    for (index, path) in (0..).zip(&paths) {
        let mut part = Header::open(path)?;
        check_part(&part, index, count).map_err(|refusal| refusal.at(path))?;
        if index > 0 {
            part.metadata.0.clear();
        }
        parts.push(part);
    }
    let first: &Header = &parts[0];
    let found: usize = parts.iter().map(|part| part.tensors.len()).sum();
    match first.metadata.optional_u32(TENSORS).map_err(|refusal| refusal.at(&first.path))? {
        Some(wanted) if wanted as usize != found => {
            let why = format!("they have {found} tensors together, and it says {wanted}");
            Err(Refusal::Split { why }.at(&first.path))
        }
        _ => Ok(parts),
    }
}

fn check_part(part: &Header, index: u32, count: u32) -> Result<(), Refusal> {
    let (found_index, found_count) = (part.metadata.u32(INDEX)?, part.metadata.u32(COUNT)?);
    if (found_index, found_count) != (index, count) {
        let why = format!(
            "it says that it is part {} of {found_count}, where {} of {count} is expected",
            u64::from(found_index) + 1,
            index + 1
        );
        return Err(Refusal::Split { why });
    }
    Ok(())
}

/// The paths of all `count` parts.
fn siblings(path: &Path, count: u32) -> Result<Vec<PathBuf>, Refusal> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // `-00001-of-00003.gguf` has 20 bytes.
    let split = name.len().checked_sub(20).and_then(|at| name.split_at_checked(at));
    let (prefix, ending) = split.unwrap_or(("", &name));
    let of = format!("-of-{count:05}.gguf");
    let number = ending.strip_prefix('-').and_then(|rest| rest.strip_suffix(of.as_str()));
    if !number.is_some_and(|digits| digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit()))
    {
        let why =
            format!("it is one of {count} and must be named `NAME-00001{of}`, as it was made");
        return Err(Refusal::Split { why });
    }
    Ok((1..=count).map(|part| path.with_file_name(format!("{prefix}-{part:05}{of}"))).collect())
}

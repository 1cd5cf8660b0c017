//! The header of a data file. The first four bytes are the length of the file beyond the header.

use gemma4_format::ptd::Header;

/// Runs the target on an input.
pub fn run(input: &[u8]) {
    let Some((beyond, json)) = input.split_first_chunk::<4>() else { return };
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json);
    let length = header.len() as u64 + u64::from(u32::from_le_bytes(*beyond));
    let Some(first) = header.first_chunk::<8>() else { return };
    if Header::size(length, *first).is_ok() {
        let _ = Header::parse(&header, length);
    }
}

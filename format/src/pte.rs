//! The `.pte` container: a header, a table of sections, and the sections, with no gap between.
//!
//! All integers are little-endian.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `\x89G4PTE\r\n` |
//! | 8 | 2 | format major version; a reader refuses another |
//! | 10 | 2 | format minor version; a reader refuses a newer one |
//! | 12 | 4 | number of sections `n` |
//! | 16 | 8 | feature bits; a reader refuses unknown ones |
//! | 24 | 8 | length of the whole file |
//! | 32 | 32 | program id: BLAKE3 of bytes `0..32` followed by the table |
//! | 64 | 56 `n` | table: kind u32, index u32, offset u64, length u64, BLAKE3 of the section |
//!
//! The id covers the table, the table covers every section, and the program section covers the
//! weights: two files with one id are the same program with the same weights.

use serde::{Serialize, de::DeserializeOwned};

use crate::plan::{self, Plan};
use crate::program::{Digest, Program};
use crate::verify::verify;
use crate::{Error, Result};

/// First bytes of a `.pte`.
pub const MAGIC: [u8; 8] = *b"\x89G4PTE\r\n";
/// Major version that this build reads and writes.
pub const MAJOR: u16 = 2;
/// Minor version that this build writes; it reads all up to it.
pub const MINOR: u16 = 0;
/// Feature bits that this build understands.
pub const FEATURES: u64 = 0;

const HEADER: usize = 64;
const ENTRY: usize = 56;
/// A program has few sections: the graph, two of text, and some for each GPU architecture.
const MAX_SECTIONS: usize = 4096;
/// Decoding a section may allocate at most this many bytes, whatever it claims.
const DECODE_LIMIT: usize = 64 << 20;

/// What a section holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum SectionKind {
    /// [`Program`], in bincode.
    Program = 1,
    /// `tokenizer.json` as the checkpoint has it.
    Tokenizer = 2,
    /// The chat template, UTF-8.
    ChatTemplate = 3,
    /// [`Plan`] for one GPU architecture, in bincode; index 0, 1, ….
    Plan = 4,
    /// Machine code (a cubin) or PTX that plans refer to by index.
    Module = 5,
}

impl SectionKind {
    fn from_word(word: u32) -> Option<Self> {
        use SectionKind::{ChatTemplate, Module, Plan, Program, Tokenizer};
        [Program, Tokenizer, ChatTemplate, Plan, Module].into_iter().find(|k| *k as u32 == word)
    }
}

/// A program with what stands beside it in the file.
#[derive(Clone, Debug)]
pub struct Pte {
    /// The verified program.
    pub program: Program,
    /// `tokenizer.json`, or empty.
    pub tokenizer: Vec<u8>,
    /// The chat template, or empty.
    pub chat_template: String,
    /// Verified plans, one for each GPU architecture; empty for a program of the CPU alone.
    pub plans: Vec<Plan>,
    /// Compiled modules that the plans refer to.
    pub modules: Vec<Vec<u8>>,
}

/// A file that was read, and its id.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The contents.
    pub pte: Pte,
    /// The digest that names this program and its weights.
    pub id: Digest,
}

/// Encodes a program file. Equal input gives equal bytes.
pub fn encode(pte: &Pte) -> Result<Vec<u8>> {
    check(pte)?;
    let mut sections = vec![
        (SectionKind::Program, 0, encode_section(&pte.program)?),
        (SectionKind::Tokenizer, 0, pte.tokenizer.clone()),
        (SectionKind::ChatTemplate, 0, pte.chat_template.clone().into_bytes()),
    ];
    for (index, plan) in pte.plans.iter().enumerate() {
        sections.push((SectionKind::Plan, index as u32, encode_section(plan)?));
    }
    for (index, module) in pte.modules.iter().enumerate() {
        sections.push((SectionKind::Module, index as u32, module.clone()));
    }
    let mut table = Vec::new();
    let mut offset = (HEADER + sections.len() * ENTRY) as u64;
    for (kind, index, bytes) in &sections {
        table.extend((*kind as u32).to_le_bytes());
        table.extend(index.to_le_bytes());
        table.extend(offset.to_le_bytes());
        table.extend((bytes.len() as u64).to_le_bytes());
        table.extend(blake3::hash(bytes).as_bytes());
        offset += bytes.len() as u64;
    }
    let mut file = Vec::with_capacity(offset as usize);
    file.extend(MAGIC);
    file.extend(MAJOR.to_le_bytes());
    file.extend(MINOR.to_le_bytes());
    file.extend((sections.len() as u32).to_le_bytes());
    file.extend(FEATURES.to_le_bytes());
    file.extend(offset.to_le_bytes());
    file.extend(program_id(&file, &table));
    file.extend(table);
    for (.., bytes) in sections {
        file.extend(bytes);
    }
    Ok(file)
}

/// Decodes and verifies a program file.
pub fn decode(file: &[u8]) -> Result<Loaded> {
    let (id, sections) = read_sections(file)?;
    let [program, tokenizer, chat_template, rest @ ..] = &sections[..] else {
        return Err(Error::malformed("the section table", "sections are missing"));
    };
    let program: Program = decode_section(program.1, "the program section")?;
    let chat_template = std::str::from_utf8(chat_template.1)
        .map_err(|e| Error::malformed("the chat template", e))?
        .to_owned();
    let (mut plans, mut modules) = (Vec::new(), Vec::new());
    for (kind, bytes) in rest {
        match kind {
            SectionKind::Plan => plans.push(decode_section(bytes, "a plan section")?),
            _ => modules.push(bytes.to_vec()),
        }
    }
    let pte = Pte { program, tokenizer: tokenizer.1.to_vec(), chat_template, plans, modules };
    check(&pte)?;
    Ok(Loaded { pte, id })
}

fn check(pte: &Pte) -> Result<()> {
    verify(&pte.program)?;
    pte.plans.iter().try_for_each(|p| plan::verify(p, &pte.program, pte.modules.len() as u32))
}

/// Kind and bytes.
type Section<'a> = (SectionKind, &'a [u8]);

/// Checks header, table and checksums; returns the id and the sections in table order: one each
/// of program, tokenizer and chat template, then plans, then modules.
fn read_sections(file: &[u8]) -> Result<(Digest, Vec<Section<'_>>)> {
    if !file.starts_with(&MAGIC) {
        return Err(Error::WrongKind { what: sniff(file), wanted: "a gemma4 program (`.pte`)" });
    }
    let truncated = |need: usize| Error::Truncated { need: need as u64, have: file.len() as u64 };
    let header = file.get(..HEADER).ok_or_else(|| truncated(HEADER))?;
    let (major, minor) = (u16_at(header, 8), u16_at(header, 10));
    if major != MAJOR || minor > MINOR {
        return Err(Error::Version { major, minor });
    }
    let features = u64_at(header, 16);
    if features & !FEATURES != 0 {
        return Err(Error::Features { bits: features & !FEATURES });
    }
    let length = u64_at(header, 24);
    let have = file.len() as u64;
    if have < length {
        return Err(Error::Truncated { need: length, have });
    }
    if have > length {
        return Err(Error::Trailing { extra: have - length });
    }
    let count = u32_at(header, 12) as usize;
    if count > MAX_SECTIONS {
        return Err(Error::malformed("the header", format!("{count} sections")));
    }
    let body = HEADER + count * ENTRY;
    let table = file.get(HEADER..body).ok_or_else(|| truncated(body))?;
    let id: Digest = program_id(&header[..32], table);
    if header[32..64] != id {
        return Err(Error::Corrupted { what: "the header".to_owned() });
    }
    let mut sections: Vec<Section<'_>> = Vec::with_capacity(count);
    let mut offset = body as u64;
    let mut index = 0;
    for entry in table.chunks_exact(ENTRY) {
        let (start, length) = (u64_at(entry, 8), u64_at(entry, 16));
        let misplaced = |why: &str| Error::malformed("the section table", why);
        let kind = SectionKind::from_word(u32_at(entry, 0))
            .ok_or_else(|| misplaced("a section of unknown kind"))?;
        let previous = sections.last().map(|(kind, _)| *kind);
        index = if previous == Some(kind) { index + 1 } else { 0 };
        let expected = match previous {
            None => kind == SectionKind::Program,
            Some(SectionKind::Program) => kind == SectionKind::Tokenizer,
            Some(SectionKind::Tokenizer) => kind == SectionKind::ChatTemplate,
            Some(previous) => kind >= SectionKind::Plan && kind >= previous,
        };
        if !expected || u32_at(entry, 4) != index || start != offset {
            return Err(misplaced("sections are out of order"));
        }
        offset = offset
            .checked_add(length)
            .filter(|end| *end <= have)
            .ok_or_else(|| misplaced("a section is longer than the file"))?;
        let section = &file[start as usize..offset as usize];
        if *blake3::hash(section).as_bytes() != entry[24..56] {
            return Err(Error::Corrupted { what: format!("the section {kind:?}") });
        }
        sections.push((kind, section));
    }
    if offset != have {
        return Err(Error::malformed("the section table", "bytes that belong to no section"));
    }
    Ok((id, sections))
}

/// What a file that is no `.pte` looks like.
fn sniff(file: &[u8]) -> &'static str {
    let at_4 = file.get(4..8).unwrap_or_default();
    match file {
        [] => "an empty file",
        _ if file.starts_with(b"GGUF") => "a GGUF file",
        _ if at_4 == b"ET12" => "an ExecuTorch program",
        _ if at_4 == b"FT01" => "an ExecuTorch data file",
        _ if file.starts_with(b"PK\x03\x04") => "a zip or PyTorch archive",
        _ if file.get(8) == Some(&b'{') => "a safetensors file (perhaps the `.ptd`)",
        _ => "an unknown kind of file",
    }
}

fn program_id(header: &[u8], table: &[u8]) -> Digest {
    *blake3::Hasher::new().update(header).update(table).finalize().as_bytes()
}

fn encode_section<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    bincode::serde::encode_to_vec(value, bincode::config::standard())
        .map_err(|e| Error::malformed("the program", e))
}

/// Decodes bincode from a slice, never from a reader, with a bound on what it may allocate.
fn decode_section<T: DeserializeOwned>(bytes: &[u8], what: &str) -> Result<T> {
    let config = bincode::config::standard().with_limit::<DECODE_LIMIT>();
    let (value, consumed) =
        bincode::serde::decode_from_slice(bytes, config).map_err(|e| Error::malformed(what, e))?;
    if consumed != bytes.len() {
        return Err(Error::malformed(what, "bytes follow its end"));
    }
    Ok(value)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

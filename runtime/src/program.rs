//! Opening the two files of an exported program.

#![allow(unsafe_code, reason = "the data file is mapped")]

use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gemma4_format::plan::Plan;
use gemma4_format::ptd::Header;
use gemma4_format::{Digest, Error as FormatError, Program, Weight, WeightId, pte};
use memmap2::{Mmap, MmapMut};
use rayon::prelude::*;

use crate::{Error, Result};

/// Bytes that one step of verification hashes.
const STEP: usize = 16 << 20;

/// Told how many bytes of all are done; called from several threads.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// A `.pte`, decoded and verified. Enough to describe a program without its weights.
#[derive(Clone, Debug)]
pub struct ProgramFile {
    path: PathBuf,
    loaded: pte::Loaded,
}

impl ProgramFile {
    /// Reads a `.pte`. Takes no more memory than the file is long.
    pub fn open(path: &Path) -> Result<Self> {
        let (mut file, length) = open_file(path)?;
        let fail = |source| Error::format(path, source);
        // Something that is not a `.pte` may be large, so the first bytes are looked at alone.
        let mut bytes = Vec::new();
        read(&mut file, path, 64, &mut bytes)?;
        let said = match bytes.get(24..32).and_then(|b| <[u8; 8]>::try_from(b).ok()) {
            Some(word) if bytes.starts_with(&pte::MAGIC) => u64::from_le_bytes(word),
            _ => 0,
        };
        read(&mut file, path, said.saturating_sub(64), &mut bytes)?;
        let loaded = pte::decode(&bytes).map_err(fail)?;
        if length > said {
            return Err(fail(FormatError::Trailing { extra: length - said }));
        }
        Ok(Self { path: path.to_owned(), loaded })
    }

    /// Where it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The verified program.
    pub fn program(&self) -> &Program {
        &self.loaded.pte.program
    }

    /// `tokenizer.json` of the checkpoint, or empty.
    pub fn tokenizer(&self) -> &[u8] {
        &self.loaded.pte.tokenizer
    }

    /// The chat template, or empty.
    pub fn chat_template(&self) -> &str {
        &self.loaded.pte.chat_template
    }

    /// Verified plans, one for each GPU architecture.
    pub fn plans(&self) -> &[Plan] {
        &self.loaded.pte.plans
    }

    /// Machine code that the plans refer to by index.
    pub fn modules(&self) -> &[Vec<u8>] {
        &self.loaded.pte.modules
    }

    /// Names this program and its weights.
    pub fn id(&self) -> &Digest {
        &self.loaded.id
    }
}

/// A mapped `.ptd` whose header belongs to a program.
#[derive(Debug)]
pub struct WeightFile {
    path: PathBuf,
    map: Mmap,
    /// Byte ranges of the parts of each weight.
    ranges: Vec<Vec<(u64, u64)>>,
    pads: Vec<(u64, u64)>,
}

impl WeightFile {
    /// Maps the data file of `program` and finds every weight in it. The header is checked
    /// against the program; the weights' bytes are not read (see [`WeightFile::verify`]).
    ///
    /// The file must not be changed while it is mapped: bytes that are written meanwhile may
    /// change results, and if it is made shorter, reading it raises SIGBUS, which the commands turn
    /// into a sentence.
    pub fn map(path: &Path, program: &Program) -> Result<Self> {
        let (mut file, length) = open_file(path)?;
        let fail = |source| Error::format(path, source);
        let mut first = Vec::new();
        read(&mut file, path, 8, &mut first)?;
        let first = <[u8; 8]>::try_from(first.as_slice())
            .map_err(|_| fail(FormatError::Truncated { need: 8, have: length }))?;
        let size = Header::size(length, first).map_err(fail)?;
        let mut bytes = first.to_vec();
        read(&mut file, path, size - 8, &mut bytes)?;
        let header = Header::parse(&bytes, length).map_err(fail)?;
        header.check(&program.data_header, program.data_length).map_err(fail)?;
        let locate = |weight: &Weight| header.locate(weight);
        let ranges = program.weights.iter().map(locate).collect::<Result<_, _>>().map_err(fail)?;
        // SAFETY: the map is only read, as bytes, and any bytes are valid; that nobody writes to
        // the file meanwhile is asked of the caller above.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io("map", path, e))?;
        let now = file.metadata().map_err(|e| Error::io("map", path, e))?.len();
        if now != length || map.len() as u64 != length {
            return Err(fail(FormatError::Truncated { need: length, have: now }));
        }
        Ok(Self { path: path.to_owned(), map, ranges, pads: header.pads().to_vec() })
    }

    /// Stands in for a data file where there is none.
    fn none() -> Result<Self> {
        let path = PathBuf::new();
        let empty = MmapMut::map_anon(1).and_then(MmapMut::make_read_only);
        let map = empty.map_err(|e| Error::io("map", &path, e))?;
        Ok(Self { path, map, ranges: Vec::new(), pads: Vec::new() })
    }

    /// Where it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The stored tensors of a weight, in the order of [`gemma4_format::Encoding::parts`].
    ///
    /// # Panics
    /// If the program has no such weight, or was opened without its data file.
    pub fn parts(&self, weight: WeightId) -> Vec<&[u8]> {
        self.ranges[weight as usize].iter().map(|range| self.bytes(*range)).collect()
    }

    /// Checks every weight against its digest, and that bytes between tensors are zero.
    ///
    /// Runs on all threads of the current rayon pool.
    ///
    /// # Errors
    /// [`Error::Corrupted`], and [`Error::Device`] if the system refuses threads.
    pub fn verify(&self, program: &Program, progress: Progress<'_>) -> Result<()> {
        start_threads()?;
        let size =
            |ranges: &[(u64, u64)]| ranges.iter().map(|(start, end)| end - start).sum::<u64>();
        let total = self.ranges.iter().map(|r| size(r)).sum::<u64>() + size(&self.pads);
        let done = AtomicU64::new(0);
        let report = |bytes: usize| {
            let before = done.fetch_add(bytes as u64, Ordering::Relaxed);
            progress(before + bytes as u64, total);
        };
        self.ranges.par_iter().zip(&program.weights).try_for_each(|(ranges, weight)| {
            let mut hasher = blake3::Hasher::new();
            for range in ranges {
                for step in self.bytes(*range).chunks(STEP) {
                    // Below this size waking other threads costs more than it saves.
                    if step.len() < 128 << 10 {
                        hasher.update(step);
                    } else {
                        hasher.update_rayon(step);
                    }
                    report(step.len());
                }
            }
            if *hasher.finalize().as_bytes() == weight.digest {
                return Ok(());
            }
            Err(self.corrupted(format!("the digest of weight `{}` does not agree", weight.name)))
        })?;
        for range in &self.pads {
            let bytes = self.bytes(*range);
            if let Some(at) = bytes.iter().position(|b| *b != 0) {
                let at = range.0 + at as u64;
                return Err(self.corrupted(format!("byte {at} between tensors is not zero")));
            }
            report(bytes.len());
        }
        Ok(())
    }

    fn bytes(&self, (start, end): (u64, u64)) -> &[u8] {
        &self.map[start as usize..end as usize]
    }

    fn corrupted(&self, what: String) -> Error {
        Error::Corrupted { path: self.path.clone(), what }
    }
}

/// A program with its weights.
#[derive(Debug)]
pub struct LoadedProgram {
    file: ProgramFile,
    weights: WeightFile,
    has_weights: bool,
    verified: AtomicBool,
}

impl LoadedProgram {
    /// Opens both files and verifies every byte of them that the program uses.
    pub fn open(pte: &Path, ptd: &Path, progress: Progress<'_>) -> Result<Self> {
        let loaded = Self::map(pte, ptd)?;
        loaded.verify_data(progress)?;
        Ok(loaded)
    }

    /// Opens both files without reading the weights, for a caller that verifies them later.
    pub fn map(pte: &Path, ptd: &Path) -> Result<Self> {
        let file = ProgramFile::open(pte)?;
        let weights = WeightFile::map(ptd, file.program())?;
        Ok(Self { file, weights, has_weights: true, verified: AtomicBool::new(false) })
    }

    /// Opens a program whose weights will not be asked for, to measure it with random ones.
    pub fn without_weights(pte: &Path) -> Result<Self> {
        let file = ProgramFile::open(pte)?;
        let weights = WeightFile::none()?;
        Ok(Self { file, weights, has_weights: false, verified: AtomicBool::new(false) })
    }

    /// Checks every weight against its digest.
    pub fn verify_data(&self, progress: Progress<'_>) -> Result<()> {
        self.weights.verify(self.file.program(), progress)?;
        self.verified.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Whether [`LoadedProgram::verify_data`] has found every weight as it should be.
    pub fn is_verified(&self) -> bool {
        self.verified.load(Ordering::Relaxed)
    }

    /// The program.
    pub fn program(&self) -> &Program {
        self.file.program()
    }

    /// The `.pte`: tokenizer, template, plans, id.
    pub fn file(&self) -> &ProgramFile {
        &self.file
    }

    /// Whether it was opened with its data file.
    pub fn has_weights(&self) -> bool {
        self.has_weights
    }

    /// The `.ptd`; without any weight if it was opened without.
    pub fn weights(&self) -> &WeightFile {
        &self.weights
    }
}

/// Starts rayon's global threads, since rayon panics where it is refused them later. That they
/// run already is no error.
fn start_threads() -> Result<()> {
    match rayon::ThreadPoolBuilder::new().build_global() {
        Err(error) if std::error::Error::source(&error).is_some() => Err(no_threads(&error)),
        _ => Ok(()),
    }
}

/// The system refused threads.
pub(crate) fn no_threads(error: &rayon::ThreadPoolBuildError) -> Error {
    Error::Device(format!("cannot start threads, perhaps for lack of memory: {error}"))
}

/// Opens a regular file and returns its length, with a sentence for what else may be there.
fn open_file(path: &Path) -> Result<(File, u64)> {
    let fail = |source| Error::io("open", path, source);
    // Opening a pipe would wait for a writer, so the kind is looked at before.
    let check = |found: &Metadata| match found {
        found if found.is_file() => Ok(()),
        found if found.is_dir() => {
            Err(Error::NoFile { path: path.to_owned(), what: "a directory" })
        }
        _ => Err(Error::NoFile { path: path.to_owned(), what: "a device or pipe" }),
    };
    check(&std::fs::metadata(path).map_err(fail)?)?;
    let file = File::open(path).map_err(fail)?;
    let found = file.metadata().map_err(fail)?;
    check(&found)?;
    Ok((file, found.len()))
}

/// Appends up to `count` bytes; fewer if the file ends.
fn read(file: &mut File, path: &Path, count: u64, bytes: &mut Vec<u8>) -> Result<()> {
    let fail = |source| Error::io("read", path, source);
    let left = file.metadata().map_err(fail)?.len().saturating_sub(bytes.len() as u64);
    usize::try_from(left.min(count))
        .ok()
        .and_then(|room| bytes.try_reserve_exact(room).ok())
        .ok_or_else(|| fail(ErrorKind::OutOfMemory.into()))?;
    file.take(left.min(count)).read_to_end(bytes).map_err(fail)?;
    Ok(())
}

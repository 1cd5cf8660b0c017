//! A file that gets its name when it is complete.
//!
//! Until then it is `.NAME.partial` in the same directory, locked by the process that writes it.
//! What a killed process leaves there is taken over by the next one that writes `NAME`, so there is
//! never more than one for each name.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// A file that is written and read at places.
#[derive(Debug)]
pub(crate) struct Sink {
    file: File,
    path: PathBuf,
}

impl Sink {
    /// Opens a file, or makes one; what it holds stays.
    pub(crate) fn open(path: PathBuf) -> Result<Self> {
        let file = open(&path).map_err(Error::io("create", &path))?;
        Ok(Self { file, path })
    }

    /// Sets its length; what is not written reads as zeros.
    pub(crate) fn set_length(&self, bytes: u64) -> Result<()> {
        self.file.set_len(bytes).map_err(Error::io("write", &self.path))
    }

    /// Writes bytes at a place.
    pub(crate) fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.file.write_all_at(bytes, offset).map_err(Error::io("write", &self.path))
    }

    /// Reads bytes at a place.
    pub(crate) fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<()> {
        self.file.read_exact_at(bytes, offset).map_err(Error::io("read", &self.path))
    }

    /// Brings what was written to the disk.
    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(Error::io("write", &self.path))
    }
}

/// A file that is not complete. Dropped, it is removed.
#[derive(Debug)]
pub struct Pending {
    /// Locked while it is open. Its errors name the target.
    sink: Sink,
    /// Where it lies, until it is renamed.
    partial: Option<PathBuf>,
}

impl Pending {
    /// Creates the file that is to become `target`, and the directories above it.
    ///
    /// # Errors
    /// [`Error::OutputNotFile`] if `target` is there and no regular file: renaming would replace
    /// even a device or a link. [`Error::OutputBusy`] if another process is writing it.
    pub fn create(target: impl Into<PathBuf>) -> Result<Self> {
        let target = target.into();
        refuse_other_kinds(&target)?;
        let dir = parent(&target);
        fs::create_dir_all(dir).map_err(Error::io("create directory", dir))?;
        let partial = partial(&target);
        refuse_other_kinds(&partial)?;
        let sink = Sink { file: claim(&partial, open)?, path: target };
        let pending = Self { sink, partial: Some(partial) };
        pending.sink.set_length(0)?;
        Ok(pending)
    }

    /// Creates it with all its contents.
    pub fn with_bytes(target: impl Into<PathBuf>, bytes: &[u8]) -> Result<Self> {
        let pending = Self::create(target)?;
        pending.write_at(bytes, 0)?;
        Ok(pending)
    }

    /// The name that it will have.
    pub fn target(&self) -> &Path {
        &self.sink.path
    }

    /// Writes bytes at a place.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.sink.write_at(bytes, offset)
    }

    pub(crate) fn sink(&self) -> &Sink {
        &self.sink
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(partial) = &self.partial {
            // Nobody could be told, and the next process that writes this name takes it over.
            let _ = fs::remove_file(partial);
        }
    }
}

/// Gives several files their names, in order, when all of them are safely on the disk.
///
/// Each appears at once and whole. A crash in between leaves the first ones: write what others
/// refer to first.
pub fn persist_all(files: impl IntoIterator<Item = Pending>) -> Result<()> {
    let mut files: Vec<Pending> = files.into_iter().collect();
    for file in &files {
        file.sink.sync()?;
    }
    for file in &mut files {
        if let Some(partial) = &file.partial {
            fs::rename(partial, file.target()).map_err(Error::io("write", file.target()))?;
            file.partial = None;
        }
        sync_dir(parent(file.target()))?;
    }
    Ok(())
}

/// Where what is to become `target` lies until it is complete.
pub(crate) fn partial(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.partial"))
}

/// Opens and locks what is to become something else; the lock ends with the process.
///
/// # Errors
/// [`Error::OutputBusy`] if another process holds it.
pub(crate) fn claim(partial: &Path, open: impl Fn(&Path) -> io::Result<File>) -> Result<File> {
    let failed = |e| Error::io("create", partial)(e);
    loop {
        let file = open(partial).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Error::OutputBusy { path: partial.to_owned() });
            }
            // Some network file systems have no locks.
            Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(e)) => return Err(failed(e)),
        }
        // Who had the lock may have renamed or removed the file before it was given up.
        let locked = file.metadata().map_err(failed)?;
        match fs::symlink_metadata(partial) {
            Ok(found) if (found.dev(), found.ino()) == (locked.dev(), locked.ino()) => {
                return Ok(file);
            }
            _ => {}
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

fn refuse_other_kinds(path: &Path) -> Result<()> {
    let what = match fs::symlink_metadata(path).map(|found| found.file_type()) {
        Err(_) => return Ok(()),
        Ok(kind) if kind.is_file() => return Ok(()),
        Ok(kind) if kind.is_dir() => "a directory",
        Ok(kind) if kind.is_symlink() => "a symbolic link",
        Ok(_) => "a device or pipe",
    };
    Err(Error::OutputNotFile { path: path.to_owned(), what })
}

/// Makes changes of names in a directory last.
pub(crate) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(Error::io("write", dir))
}

/// The directory of a path; that of a bare name is the current one.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_written_by_one_at_a_time_and_leftovers_are_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("model.ptd");
        let leftover = dir.path().join(".model.ptd.partial");
        fs::write(&leftover, "longer than what comes next").unwrap();
        let first = Pending::with_bytes(&target, b"first").unwrap();
        let busy = Pending::create(&target).unwrap_err();
        assert!(busy.to_string().contains("is being written by another process"), "{busy}");
        persist_all([first]).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"first");
        let second = Pending::with_bytes(&target, b"second").unwrap();
        assert!(leftover.exists());
        drop(second);
        assert_eq!(fs::read(&target).unwrap(), b"first");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("mine"), "kept").unwrap();
        std::os::unix::fs::symlink("mine", dir.path().join(".out.partial")).unwrap();
        let error = Pending::create(dir.path().join("out")).unwrap_err().to_string();
        assert!(error.contains(".out.partial` is a symbolic link"), "{error}");
        assert_eq!(fs::read(dir.path().join("mine")).unwrap(), b"kept");
    }
}
